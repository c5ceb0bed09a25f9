"""Messages between the ranks of a pipeline, received in any order.

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

import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm._torch.groups import ours
from dreamcomm.pipeline.errors import Failure
from dreamcomm.pipeline.messages.codec import Codec, Described, assembled
from dreamcomm.pipeline.messages.key import Key, Slot
from dreamcomm.pipeline.messages.torch_headers import TorchHeaders

if TYPE_CHECKING:
    from dreamcomm._C import HeaderChannel, PlacedMessage

__all__ = ["Channel", "PeerFailed", "RankLost"]

LOOK_MS = 100  # how often a waiting rank checks that its peers live
MODES = ("eval()", "step()")
MOST_SENDS = 64  # works under way, of headers and of tensors
MOST_PLACED = 64 << 20  # bytes that receivers have not taken yet


class PeerFailed(Exception):
    """Another rank has stopped in this step."""

    def __init__(self, source: int, reason: Any) -> None:
        super().__init__(source, reason)
        self.source, self.reason = source, reason


class RankLost(Exception):
    """A rank has ended, and the group with it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


@dataclass
class Arriving:
    """A message whose header is here."""

    mode: int
    what: Described
    tensors: list[Tensor]
    works: list[Any]


class Channel:
    """One rank's end of the messages of a pipeline.

    Args:
        group: of all ranks of the pipeline's mesh. Peers are its ranks.
        tag: the first of two that the channel uses, equal on all ranks and no other's.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self.group, self._tag = group, tag
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = self.sent_messages = 0
        self._codec = Codec()
        self._on_cpu: Any = group._get_backend(torch.device("cpu"))
        backend = ours(group, torch.device("cpu"))
        # None where Gloo carries messages.
        self._dream = backend if backend is not None and backend.shares_memory else None
        self._headers = self._make_headers()
        self._places = self._dream is not None and self._dream.shares_heaps
        self._sends: deque[Any] = deque()
        self._placed: deque[PlacedMessage] = deque()
        self._placed_bytes = 0
        self._arrived: dict[tuple[int, tuple[int, ...]], Arriving] = {}
        self._step, self._mode, self._told = 0, 0, False
        self._failed: PeerFailed | None = None

    def _make_headers(self) -> HeaderChannel | TorchHeaders:
        if self._dream is None:
            return TorchHeaders(self._on_cpu, self._tag)
        from dreamcomm import _C

        return _C.HeaderChannel(self._dream, self._tag)

    # Steps.

    def begin(self, step: int, mode: int) -> None:
        """Drops what is left of earlier steps. Messages of this one may have arrived already.

        Args:
            step: larger than the one before.
            mode: what the step does; it has to be equal on all ranks.
        """
        self._step, self._mode, self._told = step, mode, False
        self._arrived = {k: v for k, v in self._arrived.items() if k[1][0] >= step}
        self._failed = None
        for source, key in list(self._arrived):
            self._look_at(source, key)

    def end(self) -> None:
        """After a step: no message is awaited until the next one."""
        if self.size == 1:
            return
        if self._dream is not None:
            self._headers.cancel()
        elif self._failed is None and not self._told:  # else some sends may never end
            self._headers.cancel()
            while self._sends:
                self._sends.popleft().wait()

    @property
    def failure(self) -> Any:
        """Why a peer has stopped in this step, or None."""
        return None if self._failed is None else self._failed.reason

    def tell_failure(self, reason: Any) -> None:
        """Tells all peers that this rank has stopped in this step, and why. Once a step."""
        if self._told:
            return
        self._told = True
        for peer in range(self.size):
            if peer != self.rank:
                self.send(peer, Key(self._step, Slot.ERROR), reason)

    def done(self, value: Any) -> None:
        """Tells the group's rank 0 that this rank's part of the step is over."""
        self.send(0, Key(self._step, Slot.DONE), value)

    # Sending.

    def send(self, peer: int, key: Key, value: Any) -> None:
        """Sends a value without waiting for its receive, unless many sends are under way.

        Raises:
            TypeError: a part of the value cannot be sent.
        """
        data, tensors, simple = self._codec.encode(value)
        offsets = self._place_all(len(data), tensors)
        inside = self._headers.send(peer, (*key, 2 * self._mode + simple), data, offsets)
        if not inside:
            text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._issue(text, peer)
        for tensor, offset in zip(tensors, offsets or repeat(-1), strict=False):
            if tensor.numel() and offset < 0:
                self._issue(tensor, peer)
        self.sent_messages += 1
        self.sent_bytes += len(data)
        self._bound_sends()

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
        if not tensor.is_cpu or not size or self._placed_bytes + size > MOST_PLACED:
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

    def _backend_of(self, tensor: Tensor) -> Any:
        return self._on_cpu if tensor.is_cpu else self.group._get_backend(tensor.device)

    def _bound_sends(self) -> None:
        self._forget_sent()
        while self._dream is not None and self._under_way() > MOST_SENDS:
            self._accept(LOOK_MS if self._headers.pending() else 0)
            if self._sends and self._waited(self._sends[0]):
                self._sends.popleft()

    def _under_way(self) -> int:
        return len(self._sends) + self._headers.pending()

    def _forget_sent(self) -> None:
        while self._sends and self._sends[0].is_completed():
            self._sends.popleft().wait()  # raises the error of one that failed
        while self._placed and self._placed[0].taken:
            self._placed_bytes -= self._placed.popleft().nbytes

    def drain(self) -> None:
        """Waits until the memory of all that was sent may change."""
        while self._sends:
            while self._accept(0):
                pass
            if self._waited(self._sends[0]):
                self._sends.popleft()

    # Receiving.

    def poll(self) -> None:
        """Accepts the messages that have arrived, and frees what has been sent.

        Raises:
            PeerFailed: a peer has stopped in this step.
        """
        while self._accept(0):
            pass
        self._forget_sent()
        if self._failed is not None:
            raise self._failed

    def receive(self, peer: int, key: Key, *, despite_failures: bool = False) -> Any:
        """The value that a peer sends under this key.

        Args:
            peer: the sender.
            key: of the message.
            despite_failures: wait on after a peer's error.

        Raises:
            PeerFailed: a peer has stopped in this step.
            RankLost: a rank has ended.
            RuntimeError: the group's timeout is over.
        """
        wanted = (peer, key)
        began = time.monotonic()
        while wanted not in self._arrived:
            if self._failed is not None and not despite_failures:
                raise self._failed
            if not self._accept(LOOK_MS):
                self._check_timeout(wanted, began)
        arriving = self._arrived.pop(wanted)
        for work in arriving.works:
            while not self._waited(work):
                pass
        return assembled(arriving.what, arriving.tensors)

    def receive_done(self, peer: int) -> Any:
        """What a peer gave to :meth:`done` in this step."""
        return self.receive(peer, Key(self._step, Slot.DONE), despite_failures=True)

    def _accept(self, milliseconds: int) -> bool:
        """Takes the next header, if it is here within this time."""
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
        self._take(*found)
        return True

    def _take(
        self, source: int, numbers: tuple[int, ...], text: bytes | int, offsets: tuple[int, ...]
    ) -> None:
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
        if numbers[0] < self._step:
            return  # its works keep the memory until the bytes are there
        key = numbers[:4]  # equal to the Key, and found by it
        if (source, key) in self._arrived:
            raise RuntimeError(
                f"rank {source} has sent {Key(*key)} twice in one step; is the pipeline used by "  # type: ignore[arg-type]
                "two threads?"
            )
        self._arrived[source, key] = Arriving(flags >> 1, what, tensors, works)
        self._look_at(source, key)

    def _text_that_follows(self, source: int, size: int) -> bytes:
        text = bytearray(size)
        tensor = torch.frombuffer(text, dtype=torch.uint8)
        work = self._on_cpu.recv([tensor], source, self._tag + 1)
        while not self._waited(work):
            pass
        return bytes(text)

    def _look_at(self, source: int, key: tuple[int, ...]) -> None:
        """Notes a peer's error, and a peer that does something else in this step."""
        if key[0] != self._step or self._failed is not None:
            return
        arriving = self._arrived[source, key]
        if key[1] == Slot.ERROR:
            self._failed = PeerFailed(source, assembled(arriving.what, arriving.tensors))
        elif arriving.mode != self._mode:
            reason = Failure(
                source,
                "RuntimeError",
                f"it has called {MODES[arriving.mode]}, while rank {self.rank} has called "
                f"{MODES[self._mode]}; all ranks have to call the same",
            )
            self._failed = PeerFailed(source, reason)
            self.tell_failure(reason)

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

    def _check_timeout(self, wanted: tuple[int, Key], began: float) -> None:
        assert self._dream is not None
        waited = time.monotonic() - began
        if waited > self._dream.options.timeout.total_seconds():
            peer, key = wanted
            raise RuntimeError(
                f"rank {self.rank} has waited {waited:.1f} s, the group's timeout, for rank {peer} "
                f"to send {key.slot.name} of micro-batch {key.microbatch} for stage {key.stage} in "
                f"step {key.step}"
            )
