"""Ranks from a script or a notebook in one line: :func:`spawn`.

Three files, three places: ``parent`` waits and judges, ``rank_process`` is its handle on one
rank, ``rank_main`` is what runs inside that rank.
"""

from dreamcomm.launch.parent import RankError, spawn

__all__ = ["RankError", "spawn"]
