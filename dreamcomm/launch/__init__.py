"""Ranks from a script or a notebook in one line: :func:`spawn`.

``parent`` waits and judges, ``rank_process`` is its handle on one rank, ``ending`` tells that one
has ended, ``rank_main`` is what runs inside a rank.
"""

from dreamcomm.launch.parent import RankError, spawn

__all__ = ["RankError", "spawn"]
