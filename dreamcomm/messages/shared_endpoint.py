"""Carries messages in a group of dreamcomm's own: through shared memory, and between nodes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dreamcomm.messages.codec import Codec
from dreamcomm.messages.endpoint import Arriving, Endpoint

if TYPE_CHECKING:
    from dreamcomm._C import DreamBackend, PlacedMessage

__all__ = ["SharedEndpoint"]

GLANCE = timedelta(milliseconds=1)


class SharedEndpoint(Endpoint):
    """Headers travel inside of their announcements, and tensors through the sender's heap.

    Args:
        backend: dreamcomm's.
        backend_of: gives the backend of a tensor's device.
        tag: the first of three: of headers, of what is sent, and one that no message has.
        codec: of the messages.
        most_placed: bytes that may wait in the heap for their receivers.
    """

    def __init__(
        self,
        backend: DreamBackend,
        backend_of: Callable[[Tensor], Any],
        tag: int,
        codec: Codec,
        most_placed: int,
    ) -> None:
        from dreamcomm import _C

        super().__init__(backend.rank(), backend.size())
        self._backend, self._backend_of, self._tag = backend, backend_of, tag
        self._codec, self.most_placed = codec, most_placed
        self._headers = _C.HeaderChannel(backend, tag)
        self._places = backend.shares_heaps
        self._placed: deque[PlacedMessage] = deque()
        self._placed_bytes = 0
        self._watched: dict[int, tuple[Any, float]] = {}  # with the time
        # Each message calls them: without a frame between.
        self.send_header = self._headers.send  # type: ignore[method-assign]
        self.pending = self._headers.pending  # type: ignore[method-assign]

    @property
    def timeout(self) -> float:
        return self._backend.options.timeout.total_seconds()

    # Sending.

    def place(self, description: int, tensors: Sequence[Tensor]) -> Sequence[int]:
        """Copies the tensors into the heap, those that may be."""
        if not self._places or not tensors or not self._headers.fits(description, len(tensors)):
            return ()
        return [self._place(tensor) for tensor in tensors]

    def _place(self, tensor: Tensor) -> int:
        size = tensor.nbytes
        if not tensor.is_cpu or not size or self._placed_bytes + size > self.most_placed:
            return -1
        placed = self._backend._place(tensor)
        if placed is None:
            return -1
        self._placed.append(placed)
        self._placed_bytes += size
        return placed.offset

    def forget_placed(self) -> None:
        while self._placed and self._placed[0].taken:
            self._placed_bytes -= self._placed.popleft().nbytes

    def send_header(
        self, peer: int, key: tuple[int, ...], description: bytes, offsets: Sequence[int]
    ) -> bool:
        return self._headers.send(peer, key, description, offsets)

    def pending(self) -> int:
        return self._headers.pending()

    def send(self, tensor: Tensor, peer: int) -> Any:
        return self._backend_of(tensor).send([tensor], peer, self._tag + 1)

    # Receiving.

    def next(self, milliseconds: int) -> Arriving | None:
        """Takes what is placed, and posts receives for what follows the header."""
        found = self._headers.next(milliseconds)
        if found is None:
            return None
        source, numbers, text, offsets = found
        flags = numbers[4]
        data = text if isinstance(text, bytes) else self._text_that_follows(source, text)
        what = self._codec.decode(data, bool(flags & 1))
        tensors, works = [], []
        for meta, offset in zip(what.metas, offsets or repeat(-1), strict=False):
            if offset >= 0:
                memory = self._backend._take_placed(source, offset, meta.memory_shape, meta.dtype)
                tensors.append(meta.in_order(memory))
                continue
            tensor, memory = self._codec.memory_for(meta)
            tensors.append(tensor)
            if memory.numel():
                works.append(self._backend_of(memory).recv([memory], source, self._tag + 1))
        return Arriving(source, numbers[:4], flags >> 1, what, tensors, works)

    def _text_that_follows(self, source: int, size: int) -> bytes:
        text = bytearray(size)
        tensor = torch.frombuffer(text, dtype=torch.uint8)
        work = self._backend_of(tensor).recv([tensor], source, self._tag + 1)
        while not self.waited(work):
            pass
        return bytes(text)

    def close(self, *, sends_end: bool) -> None:
        self.end_looks()
        self._headers.cancel()

    # Peers.

    def has_ended(self, peer: int) -> bool:
        return self._backend._has_ended(peer)

    def departure(self, peer: int) -> str:
        """Looks at a receive from the peer that nothing is sent for, and waits a moment for it.

        The receive of headers, from any source, goes on while some other peer is left, so it does
        not notice one that has destroyed its group. A receive from one peer does, and says how it
        has left. :meth:`end_looks` cancels it when the wait is over. A receive that stays posted
        is reported as late.
        """
        try:
            if peer not in self._watched:
                nothing = torch.empty(1, device="cpu")
                work = self._backend_of(nothing).recv([nothing], peer, self._tag + 2)
                self._watched[peer] = (work, time.monotonic())
            work, begin = self._watched[peer]
        except RuntimeError:  # this rank has left itself, or the group has failed
            return ""
        with suppress(RuntimeError):  # not done within the moment, or failed
            work.wait(GLANCE)
        if not work.is_completed():
            return ""
        del self._watched[peer]
        if time.monotonic() - begin > self.timeout / 2:
            return ""  # the receive itself has reached the group's timeout: the next one says more
        try:
            work.wait()
        except RuntimeError as error:
            return str(error)
        return f"rank {peer} has sent under a tag of another's"

    def end_looks(self) -> None:
        for work, _ in self._watched.values():
            self._backend._cancel(work)
        self._watched.clear()
