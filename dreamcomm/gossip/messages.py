"""What the messages of gossip are."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from dreamcomm.ranks.errors import Error

__all__ = ["Gathering", "GossipError", "Halt", "Kind"]


class GossipError(Error, RuntimeError):
    """A rank has ended or failed, or ranks have stepped differently. All ranks raise it."""


class Gathering(IntEnum):
    """Calls in which all ranks wait for each other."""

    FINISH = 0
    AVERAGE_NOW = 1
    STATE_DICT = 2
    LOAD_STATE_DICT = 3

    def __str__(self) -> str:
        return f"{self.name.lower()}()"


class Kind(IntEnum):
    """The first number of a message's key."""

    PIECE = 0  # then the step and the number of the piece
    GATHER = 1  # then a Halt's step, call and steps to load
    FAILED = 2  # the value is the first failure that the sender knows of


class Halt(NamedTuple):
    """Where a rank waits for all others.

    Attributes:
        call: that it is in.
        step: the last one that it has made.
        loaded: the steps of the state that it loads.
    """

    call: Gathering
    step: int
    loaded: int
