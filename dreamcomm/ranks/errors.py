"""The base class of all errors that are ours, and the loss of a rank."""

from __future__ import annotations

__all__ = ["Error", "RankLeft", "RankLost"]


class Error(Exception):
    """Any error of dreamcomm's own.

    Each one is a ``RuntimeError`` or a ``ValueError`` besides. Errors of collectives are torch's
    ``DistBackendError``.
    """


class RankLost(Error):
    """A rank has ended, and the group with it.

    Attributes:
        rank: of the group.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank

    def __str__(self) -> str:
        return f"rank {self.rank} has ended, and the group with it"


class RankLeft(RankLost):
    """A rank has left the group, or its connection has ended. Its process may live.

    Attributes:
        why: in the transport's words.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(rank)
        self.args = (rank, why)
        self.why = why

    def __str__(self) -> str:
        return f"rank {self.rank} has left the group: {self.why}"
