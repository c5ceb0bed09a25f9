"""A header as bytes, where nothing else than tensors can be sent."""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["BYTES", "Header", "packed", "unpacked"]

BYTES = 960
FIELDS = struct.Struct("<5qII")
ROOM = BYTES - FIELDS.size


class Header(NamedTuple):
    """What a receiver learns of a message first.

    Attributes:
        key: five numbers.
        size: bytes of the description.
        inside: the description, or empty where it does not fit: then it follows.
    """

    key: tuple[int, ...]
    size: int
    inside: bytes


def packed(key: tuple[int, ...], description: bytes) -> tuple[bytearray, bool]:
    """The bytes of a header, and whether the description is in it."""
    fits = len(description) <= ROOM
    own = description if fits else b""
    data = bytearray(BYTES)
    FIELDS.pack_into(data, 0, *key, len(description), len(own))
    data[FIELDS.size : FIELDS.size + len(own)] = own
    return data, fits


def unpacked(data: bytearray) -> Header:
    """The header of such bytes."""
    *key, size, inside = FIELDS.unpack_from(data)
    return Header(tuple(key), size, bytes(data[FIELDS.size : FIELDS.size + inside]))
