"""Messages between the ranks of a pipeline, received in any order.

A message is a header of fixed size and the tensors that it describes. Headers of all peers arrive
at one receive from any source, in the order in which each peer sent them. The receiver then posts
receives for the tensors, into memory that peers map.

INVARIANT (matching): a sender issues the header of a message and then its tensors, from one thread,
and all tensors under one tag. A receiver posts receives for a peer's tensors in the order of that
peer's headers, whether or not it wants them. So the n-th tensor that is sent to a rank is the n-th
that it receives from that peer, and a message can be dropped without confusing those behind it.

INVARIANT (no deadlock by order): a rank that waits, for a message or for a send to end, accepts all
messages that arrive. So a send ends as soon as its receiver waits for anything, and what a rank
waits for never depends on the order in which its peer posted messages.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm._torch.groups import ours
from dreamcomm.pipeline.errors import Failure
from dreamcomm.pipeline.messages.codec import Codec, Described, TensorMeta, assembled
from dreamcomm.pipeline.messages.header import HEADER_BYTES, Header, Key, Slot

__all__ = ["Channel", "PeerFailed", "RankLost"]

LOOK = timedelta(milliseconds=100)  # how often a waiting rank checks that its peers live
MODES = ("eval()", "step()")
MOST_SENDS = 64  # works under way, of headers and tensors


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
        # None where Gloo carries messages: it moves, and ends, only what a thread waits for.
        self._dream = backend if backend is not None and backend.shares_memory else None
        self._buffer = bytearray(HEADER_BYTES)
        self._header = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._posted: Any = None
        self._sends: deque[Any] = deque()
        self._arrived: dict[tuple[int, Key], Arriving] = {}
        self._step, self._mode, self._told = 0, 0, False
        self._failed: PeerFailed | None = None

    # Steps.

    def begin(self, step: int, mode: int) -> None:
        """Drops what is left of earlier steps. Messages of this one may have arrived already.

        Args:
            step: larger than the one before.
            mode: what the step does; it has to be equal on all ranks.
        """
        self._step, self._mode, self._told = step, mode, False
        self._arrived = {k: v for k, v in self._arrived.items() if k[1].step >= step}
        self._failed = None
        for source, key in list(self._arrived):
            self._look_at(source, key)

    def end(self) -> None:
        """Withdraws the receive of headers: no message is awaited until the next step."""
        if self._dream is None and self._failed is None and not self._told:
            while self._sends:
                self._sends.popleft().wait()
        if self._posted is None or self._dream is None:
            return
        self._dream._cancel_receive(self._posted)
        while self._posted is not None and self._accept():
            pass

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
        header = Header(key, self._mode, len(data), simple, data)
        first = header._replace(description=b"") if header.follows else header
        self._issue(torch.frombuffer(first.write(), dtype=torch.uint8), peer, self._tag)
        if header.follows:
            text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._issue(text, peer, self._tag + 1)
        for tensor in tensors:
            if tensor.numel():
                self._issue(tensor, peer, self._tag + 1)
        self.sent_messages += 1
        self._bound_sends()

    def _issue(self, tensor: Tensor, peer: int, tag: int) -> None:
        self._sends.append(self._backend_of(tensor).send([tensor], peer, tag))
        self.sent_bytes += tensor.nbytes

    def _backend_of(self, tensor: Tensor) -> Any:
        return self._on_cpu if tensor.is_cpu else self.group._get_backend(tensor.device)

    def _bound_sends(self) -> None:
        self._forget_sent()
        while len(self._sends) > MOST_SENDS and self._dream is not None:
            while self._accept():
                pass
            if self._waited(self._sends[0]):
                self._sends.popleft()

    def _forget_sent(self) -> None:
        while self._sends and self._sends[0].is_completed():
            self._sends.popleft().wait()  # raises the error of one that failed

    def drain(self) -> None:
        """Waits until all that was sent is with its receivers, and its memory may change."""
        while self._sends:
            while self._accept():
                pass
            if self._waited(self._sends[0]):
                self._sends.popleft()

    # Receiving.

    def poll(self) -> None:
        """Accepts the messages that have arrived, and frees what has been sent.

        Raises:
            PeerFailed: a peer has stopped in this step.
        """
        while self._accept():
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
            self._accept(wanted=wanted, began=began)
        arriving = self._arrived.pop(wanted)
        for work in arriving.works:
            while not self._waited(work):
                pass
        return assembled(arriving.what, arriving.tensors)

    def receive_done(self, peer: int) -> Any:
        """What a peer gave to :meth:`done` in this step, whatever it has called."""
        return self.receive(peer, Key(self._step, Slot.DONE), despite_failures=True)

    def has(self, peer: int, key: Key) -> bool:
        """Whether the header of such a message is here."""
        return (peer, key) in self._arrived

    def _accept(self, wanted: tuple[int, Key] | None = None, began: float = 0.0) -> bool:
        """Takes the next header; without one that is wanted, only if it is here."""
        if self._posted is None:
            self._posted = self._on_cpu.recv_anysource([self._header], self._tag)
        if wanted is None and not self._posted.is_completed():
            return False
        try:
            if not self._waited(self._posted):
                if wanted is not None:
                    self._check_timeout(wanted, began)
                return False
        except RankLost:
            raise
        except Exception:
            if not self._posted.is_completed():
                raise
            self._posted = None  # withdrawn, or older than the group's timeout
            if wanted is not None:
                self._check_timeout(wanted, began)
            return False
        source = self._posted._source_rank()
        header = Header.read(self._buffer)
        self._posted = None
        self._take(source, header)
        return True

    def _take(self, source: int, header: Header) -> None:
        """Posts receives for what follows a header."""
        data = header.description
        if header.follows:
            text = bytearray(header.size)
            work = self._on_cpu.recv(
                [torch.frombuffer(text, dtype=torch.uint8)], source, self._tag + 1
            )
            while not self._waited(work):
                pass
            data = bytes(text)
        what = self._codec.decode(data, header.simple)
        tensors, works = [], []
        for meta in what.leaves:
            if isinstance(meta, TensorMeta):
                tensor, memory = self._codec.memory_for(meta)
                if memory.numel():
                    backend = self._backend_of(memory)
                    works.append(backend.recv([memory], source, self._tag + 1))
                tensors.append(tensor)
        if header.key.step < self._step:
            return  # its works keep the memory until the bytes are there
        if (source, header.key) in self._arrived:
            raise RuntimeError(
                f"rank {source} has sent {header.key} twice in one step; is the pipeline used by "
                "two threads?"
            )
        self._arrived[source, header.key] = Arriving(header.mode, what, tensors, works)
        self._look_at(source, header.key)

    def _look_at(self, source: int, key: Key) -> None:
        """Notes a peer's error, and a peer that does something else in this step."""
        if key.step != self._step or self._failed is not None:
            return
        arriving = self._arrived[source, key]
        if key.slot is Slot.ERROR:
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
            work.wait(LOOK)
            return True
        except RuntimeError:
            lost = self.lost_rank()
            if lost is not None:
                raise RankLost(lost) from None
            if not work.is_completed():
                return False
            # It may have ended since the time to look: then its own result counts.
            work.wait()
            return True

    def lost_rank(self) -> int | None:
        """The first rank of the group whose process has ended, or None."""
        if self._dream is None:
            return None
        others = (one for one in range(self.size) if one != self.rank)
        return next((one for one in others if self._dream._has_ended(one)), None)

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
