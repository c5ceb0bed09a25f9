"""Ranks from a script or a notebook in one line: :func:`spawn`.

``parent`` waits for the ranks and finds the first failure, ``rank_process`` is its handle on one
rank, ``ending`` notifies it of a rank's end, and ``rank_main`` runs inside a rank.
"""

from dreamcomm.launch.parent import RankError, spawn

__all__ = ["RankError", "spawn"]
