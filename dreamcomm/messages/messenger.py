"""Messages between the ranks of a group, taken in the order in which they arrive.

A message is a header and the tensors that it describes. Headers of all peers arrive at one receive
from any source, in the order in which each peer sent them. A tensor is placed: its sender copies it
into its heap, and its receiver copies it from there, with nothing to wait for on either side
(csrc/c10d/backend/placed_message.h). Where too much is placed already, or there is no heap that
peers map, it is sent: the receiver posts a receive for it once it has the header.

INVARIANT (matching): a sender issues the header of a message and then its tensors, from one thread,
and all tensors under one tag. A receiver posts receives for a peer's tensors in the order of that
peer's headers, whether or not it wants them. So the n-th tensor that is sent to a rank is the n-th
that it receives from that peer, and a message can be dropped without confusing those behind it.
Placed tensors are taken when their header is read.

INVARIANT (no deadlock by order): a rank that waits, for a message or for a send to end, accepts all
messages that arrive. So a send ends as soon as its receiver waits for anything, and what a rank
waits for never depends on the order in which its peer posted messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm._torch.groups import as_ours
from dreamcomm.messages.codec import Codec, Described, assembled
from dreamcomm.messages.torch_headers import TorchHeaders
from dreamcomm.ranks.errors import RankLost

if TYPE_CHECKING:
    from dreamcomm._C import DreamBackend, HeaderChannel, PlacedMessage

__all__ = ["LOOK_MS", "MOST_SENDS", "Arriving", "Messenger"]

LOOK_MS = 100  # how often a waiting rank checks that its peers live
MOST_SENDS = 64  # works under way, of headers and of tensors
MOST_PLACED = 64 << 20  # bytes that receivers have not taken yet
MOST_TOLD = 800  # bytes of a text, which a header holds


@dataclass
class Arriving:
    """A message whose header is here.

    Attributes:
        source: the sender.
        key: four numbers, as the sender gave them.
        mark: a small number beside the key.
    """

    source: int
    key: tuple[int, ...]
    mark: int
    what: Described
    tensors: list[Tensor]
    works: list[Any]


class Messenger:
    """One rank's end of the messages of a group. For one thread at a time.

    Args:
        on_cpu: the group's backend of CPU tensors.
        backend_of: gives the backend of a tensor's device.
        rank, size: of the group.
        tag: the first of two that it uses, equal on all ranks and no other's.
        most_placed: bytes that may wait in the heap for their receivers; what goes beyond is sent
            from where it is, and must not change before :meth:`drain`.
    """

    def __init__(
        self,
        on_cpu: Any,
        backend_of: Callable[[Tensor], Any],
        rank: int,
        size: int,
        tag: int,
        most_placed: int = MOST_PLACED,
    ) -> None:
        self.rank, self.size, self._tag = rank, size, tag
        self.sent_bytes = self.sent_messages = 0
        self._on_cpu, self._backend_of = on_cpu, backend_of
        self._codec = Codec()
        backend = as_ours(on_cpu)
        # None where Gloo carries messages.
        self._dream = backend if backend is not None and backend.shares_memory else None
        self._headers = self._make_headers()
        self._places = self._dream is not None and self._dream.shares_heaps
        self._most_placed = most_placed
        self._sends: deque[Any] = deque()
        self._placed: deque[PlacedMessage] = deque()
        self._placed_bytes = 0
        self._inbox: deque[Arriving] = deque()  # accepted while this rank waited for a send

    @classmethod
    def over(cls, group: dist.ProcessGroup, tag: int) -> Messenger:
        """For the ranks of a torch group."""
        on_cpu = group._get_backend(torch.device("cpu"))
        return cls(
            on_cpu,
            lambda tensor: on_cpu if tensor.is_cpu else group._get_backend(tensor.device),
            dist.get_rank(group),
            dist.get_world_size(group),
            tag,
        )

    @classmethod
    def on(cls, backend: DreamBackend, tag: int, most_placed: int = MOST_PLACED) -> Messenger:
        """For a backend that no torch group holds."""
        rank, size = backend.rank(), backend.size()
        return cls(backend, lambda _: backend, rank, size, tag, most_placed)

    @property
    def backend(self) -> DreamBackend | None:
        """dreamcomm's, or None where another carries the messages."""
        return self._dream

    def _make_headers(self) -> HeaderChannel | TorchHeaders:
        if self._dream is None:
            return TorchHeaders(self._on_cpu, self._tag)
        from dreamcomm import _C

        return _C.HeaderChannel(self._dream, self._tag)

    # Sending.

    def send(
        self,
        peer: int,
        key: tuple[int, ...],
        value: Any,
        mark: int = 0,
        *,
        may_change: bool = False,
    ) -> None:
        """Sends a value without waiting for its receive, unless many sends are under way.

        Args:
            peer: the receiver, another rank.
            key: four numbers for the receiver.
            value: a tree of tensors and other values that can be pickled.
            mark: a small number for the receiver, from 0 on.
            may_change: the caller may write to the tensors before the receiver has taken them:
                what is sent from where it lies is copied first.

        Raises:
            TypeError: a part of the value cannot be sent.
        """
        data, tensors, simple = self._codec.encode(value)
        offsets = self._place_all(len(data), tensors)
        inside = self._headers.send(peer, (*key, 2 * mark + simple), data, offsets)
        if not inside:
            text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._issue(text, peer)
        for tensor, offset in zip(tensors, offsets or repeat(-1), strict=False):
            if tensor.numel() and offset < 0:
                self._issue(tensor.clone() if may_change else tensor, peer)
        self.sent_messages += 1
        self.sent_bytes += len(data)
        self._bound_sends()

    def tell(self, peer: int, key: tuple[int, ...], text: str) -> None:
        """Sends a text, and waits for nothing, however many sends are under way.

        It travels in the header, so that it arrives also if this rank leaves at once, unless the
        peer has left more headers before it than the transport holds. What a header does not hold
        is cut.

        Raises:
            RuntimeError: the group has failed, or the peer has left it.
        """
        data, _, simple = self._codec.encode(_cut(text))
        self._headers.send(peer, (*key, int(simple)), data, ())
        self.sent_messages += 1
        self.sent_bytes += len(data)

    def _place_all(self, description: int, tensors: list[Tensor]) -> tuple[int, ...]:
        """Copies the tensors into the heap, those that may be; returns where they are, or -1."""
        if not self._places or not tensors or not self._headers_fit(description, len(tensors)):
            return ()
        return tuple([self._place(tensor) for tensor in tensors])

    def _headers_fit(self, description: int, tensors: int) -> bool:
        headers = self._headers
        return not isinstance(headers, TorchHeaders) and headers.fits(description, tensors)

    def _place(self, tensor: Tensor) -> int:
        size = tensor.nbytes
        if not tensor.is_cpu or not size or self._placed_bytes + size > self._most_placed:
            return -1
        assert self._dream is not None
        placed = self._dream._place(tensor)
        if placed is None:
            return -1
        self._placed.append(placed)
        self._placed_bytes += size
        self.sent_bytes += size
        return placed.offset

    def _issue(self, tensor: Tensor, peer: int) -> None:
        self._sends.append(self._backend_of(tensor).send([tensor], peer, self._tag + 1))
        self.sent_bytes += tensor.nbytes

    def _bound_sends(self) -> None:
        self.forget_sent()
        while self._dream is not None and self._under_way() > MOST_SENDS:
            self._admit(LOOK_MS if self._headers.pending() else 0)
            if self._sends and self._waited(self._sends[0]):
                self._sends.popleft()

    def _under_way(self) -> int:
        return len(self._sends) + self._headers.pending()

    def forget_sent(self) -> None:
        """Frees what receivers have taken. Raises the error of a send that failed."""
        while self._sends and self._sends[0].is_completed():
            self._sends.popleft().wait()
        while self._placed and self._placed[0].taken:
            self._placed_bytes -= self._placed.popleft().nbytes

    def drain(self) -> None:
        """Waits until the memory of all that was sent may change.

        Raises:
            RankLost: a rank has ended.
        """
        while self._sends:
            while self._admit(0):
                pass
            if self._waited(self._sends[0]):
                self._sends.popleft()

    def close(self, *, sends_end: bool = True) -> None:
        """No message is awaited until the next :meth:`accept`.

        Args:
            sends_end: whether all that was sent will be received. Gloo's sends have to be waited
                for, which would take for ever if not.
        """
        if self.size == 1:
            return
        if self._dream is not None:
            self._headers.cancel()
        elif sends_end:
            self._headers.cancel()
            while self._sends:
                self._sends.popleft().wait()

    # Receiving.

    def accept(self, milliseconds: int) -> Arriving | None:
        """The next message of any peer, if its header is here within this time.

        Where Gloo carries messages this waits until there is one, and does not look if the time
        is 0.

        Raises:
            RankLost: a rank has ended.
            RuntimeError: the group has failed.
        """
        if not self._inbox and not self._admit(milliseconds):
            return None
        return self._inbox.popleft()

    def value(self, arriving: Arriving) -> Any:
        """The value of a message, when its tensors are here.

        Raises:
            RankLost: a rank has ended.
            RuntimeError: the group has failed.
        """
        for work in arriving.works:
            while not self._waited(work):
                pass
        return assembled(arriving.what, arriving.tensors)

    def _admit(self, milliseconds: int) -> bool:
        """Takes the next header into the inbox, if it is here within this time."""
        if self.size == 1:
            return False
        try:
            found = self._headers.next(milliseconds)
        except RuntimeError:
            self._check_lost()
            if self._dream is None:
                raise
            # The receive is older than the group's timeout. A group that has failed says so at the
            # next one.
            found = self._headers.next(milliseconds)
        if found is None:
            if milliseconds:
                self._check_lost()
            return False
        self._inbox.append(self._taken(*found))
        return True

    def _taken(
        self, source: int, numbers: tuple[int, ...], text: bytes | int, offsets: tuple[int, ...]
    ) -> Arriving:
        """Takes what is placed, and posts receives for what follows a header."""
        flags = numbers[4]
        data = text if isinstance(text, bytes) else self._text_that_follows(source, text)
        what = self._codec.decode(data, bool(flags & 1))
        tensors, works = [], []
        for meta, offset in zip(what.metas, offsets or repeat(-1), strict=False):
            if offset >= 0:
                assert self._dream is not None
                memory = self._dream._take_placed(source, offset, meta.memory_shape, meta.dtype)
                tensors.append(meta.in_order(memory))
                continue
            tensor, memory = self._codec.memory_for(meta)
            tensors.append(tensor)
            if memory.numel():
                backend = self._backend_of(memory)
                works.append(backend.recv([memory], source, self._tag + 1))
        return Arriving(source, numbers[:4], flags >> 1, what, tensors, works)

    def _text_that_follows(self, source: int, size: int) -> bytes:
        text = bytearray(size)
        tensor = torch.frombuffer(text, dtype=torch.uint8)
        work = self._on_cpu.recv([tensor], source, self._tag + 1)
        while not self._waited(work):
            pass
        return bytes(text)

    # Waiting.

    def _waited(self, work: Any) -> bool:
        """Waits a moment; whether the work is done. Raises its error, or RankLost."""
        if self._dream is None:
            work.wait()
            return True
        try:
            work.wait(timedelta(milliseconds=LOOK_MS))
        except RuntimeError:
            self._check_lost()
            if not work.is_completed():
                return False
            # It may have ended since the time to look: then its own result counts.
            work.wait()
        return True

    def _check_lost(self) -> None:
        """Raises if the process of a rank of the group has ended."""
        if self._dream is None:
            return
        for one in range(self.size):
            if one != self.rank and self._dream._has_ended(one):
                raise RankLost(one)


def _cut(text: str) -> str:
    """At most MOST_TOLD bytes of a text."""
    data, mark = text.encode(errors="replace"), " ... (cut)"
    if len(data) <= MOST_TOLD:
        return text
    return data[: MOST_TOLD - len(mark)].decode(errors="ignore") + mark
