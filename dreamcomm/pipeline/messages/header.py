"""The header of a message: its key, and the description of what follows."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["Header", "Key", "Slot"]


class Slot(IntEnum):
    """What a message is for."""

    FORWARD = 0  # what a stage takes
    BACKWARD = 1  # the gradients of what a stage gave
    ERROR = 2  # why the sender has stopped in this step
    DONE = 3  # the sender's part of this step is over; to the group's rank 0
    VERDICT = 4  # whether all parts of this step went well; from the group's rank 0
    TIED = 5  # weights or gradients of a shared parameter


SLOTS = tuple(Slot)


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


class Header(NamedTuple):
    """A header.

    Attributes:
        key: of the message.
        mode: what the sender does in this step.
        simple: equal descriptions are equal values, apart from the tensors.
        description: its bytes, or their number where they follow.
        offsets: for each tensor its place in the sender's heap, or -1 for one that is sent; none
            where all are sent.
    """

    key: Key
    mode: int
    simple: bool
    description: bytes | int
    offsets: tuple[int, ...]

    def numbers(self) -> tuple[int, int, int, int, int]:
        """The key and the rest as the numbers that a HeaderChannel sends."""
        step, slot, stage, microbatch = self.key
        return step, slot, stage, microbatch, 2 * self.mode + self.simple

    @classmethod
    def of(
        cls, numbers: tuple[int, ...], description: bytes | int, offsets: tuple[int, ...]
    ) -> Header:
        """What was sent as these numbers."""
        step, slot, stage, microbatch, rest = numbers
        key = Key(step, SLOTS[slot], stage, microbatch)
        return cls(key, rest >> 1, bool(rest & 1), description, offsets)
