"""What a message is found by."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["Key", "Slot"]


class Slot(IntEnum):
    """What a message is for."""

    FORWARD = 0  # what a stage takes
    BACKWARD = 1  # the gradients of what a stage gave
    ERROR = 2  # why the sender has stopped in this step
    DONE = 3  # the sender's part of this step is over; to the group's rank 0
    VERDICT = 4  # whether all parts of this step went well; from the group's rank 0
    TIED = 5  # weights or gradients of a shared parameter


class Key(NamedTuple):
    """What a receiver finds a message by.

    Attributes:
        step: counts the calls of a pipeline.
        slot: what it is for.
        stage: that the message is for; -1: for none.
        microbatch: -1: for none.
    """

    step: int
    slot: Slot
    stage: int = -1
    microbatch: int = -1
