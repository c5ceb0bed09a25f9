"""The demonstration: a small GPT trained by several processes, compared with the same on Gloo.

``text`` is the training data, ``model`` the network. ``train`` runs inside each rank, ``compare``
runs every backend in turn, ``report`` and ``picture`` show the outcome.
"""
