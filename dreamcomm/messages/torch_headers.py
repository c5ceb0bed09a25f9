"""Headers over any backend of torch: for groups whose ranks share no memory."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["TorchHeaders"]

BYTES = 960
FIELDS = struct.Struct("<5qIII")
ROOM = BYTES - FIELDS.size


class TorchHeaders:
    """What dreamcomm's compiled HeaderChannel does, by send() and recv_anysource() of a backend.

    Gloo moves, and ends, only what a thread waits for: :meth:`next` does not return before there is
    a header, however short the time, and nothing is known to be under way.

    Args:
        backend: of tensors on the CPU.
        tag: no other messages have it.
    """

    def __init__(self, backend: Any, tag: int) -> None:
        self._backend, self._tag = backend, tag
        self._buffer = bytearray(BYTES)
        self._tensor = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._sends: deque[Any] = deque()

    def send(
        self, peer: int, key: tuple[int, ...], description: bytes, offsets: Sequence[int]
    ) -> bool:
        """Sends a header; returns whether the description was in it."""
        assert not offsets
        inside = len(description) <= ROOM
        data = bytearray(BYTES)
        own = description if inside else b""
        FIELDS.pack_into(data, 0, *key, len(description), len(own), 0)
        data[FIELDS.size : FIELDS.size + len(own)] = own
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        self._sends.append(self._backend.send([tensor], peer, self._tag))
        return inside

    def next(
        self, milliseconds: int
    ) -> tuple[int, tuple[int, ...], bytes | int, tuple[int, ...]] | None:
        """The next header; None where it is not to be waited for."""
        if milliseconds == 0:
            return None
        work = self._backend.recv_anysource([self._tensor], self._tag)
        work.wait()
        *key, size, inside, _ = FIELDS.unpack_from(self._buffer)
        text = bytes(self._buffer[FIELDS.size : FIELDS.size + inside])
        return work._source_rank(), tuple(key), text if inside == size else size, ()

    def pending(self) -> int:
        """None that is known of."""
        return 0

    def cancel(self) -> None:
        """Waits for what was sent; every header has been received."""
        while self._sends:
            self._sends.popleft().wait()
