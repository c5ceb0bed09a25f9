"""The header of a message: its key, and the description of what follows."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

__all__ = ["HEADER_BYTES", "INLINE_BYTES", "Header", "Key", "Slot"]

# A message of this size travels inside its announcement (csrc/transport/window.h, kInline).
HEADER_BYTES = 960
FIELDS = struct.Struct("<IBBHQiiI")
INLINE_BYTES = HEADER_BYTES - FIELDS.size
MAGIC = 0x44435031  # "DCP1"


class Slot(IntEnum):
    """What a message is for."""

    FORWARD = 0  # what a stage takes
    BACKWARD = 1  # the gradients of what a stage gave
    ERROR = 2  # why the sender has stopped in this step
    DONE = 3  # the sender's part of this step is over; to the group's rank 0
    VERDICT = 4  # whether all parts of this step went well; from the group's rank 0
    TIED = 5  # gradients of a shared parameter


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
        size: bytes of the description. It follows in a message of its own where it does not fit.
        simple: equal descriptions are equal values, apart from the tensors.
        description: its bytes; empty where they follow.
    """

    key: Key
    mode: int
    size: int
    simple: bool
    description: bytes

    @property
    def follows(self) -> bool:
        """Whether the description comes in a message of its own."""
        return self.size > INLINE_BYTES

    def write(self) -> bytearray:
        """The header as the bytes of a message."""
        data = bytearray(HEADER_BYTES)
        key = self.key
        fields = (key.slot, self.simple, self.mode, key.step, key.stage, key.microbatch, self.size)
        FIELDS.pack_into(data, 0, MAGIC, *fields)
        data[FIELDS.size : FIELDS.size + len(self.description)] = self.description
        return data

    @classmethod
    def read(cls, data: bytearray) -> Header:
        """The header in the bytes of a message.

        Raises:
            RuntimeError: it is none.
        """
        magic, slot, simple, mode, step, stage, microbatch, size = FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise RuntimeError("a message that is none of this pipeline's has come under its tag")
        inline = size if size <= INLINE_BYTES else 0
        description = bytes(data[FIELDS.size : FIELDS.size + inline])
        key = Key(step, Slot(slot), stage, microbatch)
        return cls(key, mode, size, bool(simple), description)
