"""The benchmark: collectives through torch and on the bare core, compared with another backend.

``cases`` defines what is measured (``sizes`` and ``casefile`` read it, ``operations`` is the table
of collectives). ``rank`` runs in every rank, with ``buffers``, ``verify``, ``variants`` and
``timing``. ``statistics`` turns durations into figures; ``report``, ``plot`` and ``result`` show
them. ``run`` controls all of it. ``benchmarks/README.md`` defines every figure.
"""
