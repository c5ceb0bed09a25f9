"""The demonstration: a small GPT trained by several processes, beside the same run on Gloo.

``text`` is what it learns, ``model`` what learns, ``train`` runs inside each rank, ``compare``
runs every backend in turn, ``report`` and ``picture`` show the outcome.
"""
