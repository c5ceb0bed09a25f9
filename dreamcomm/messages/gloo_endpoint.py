"""Carries messages where ranks share no memory: over Gloo, or any backend of torch.

Gloo moves a message while a thread waits for it, cannot be asked whether one has come, and a wait
without a result ends all of its connections. So threads wait, for as long as it takes: one for each
peer receives whole messages, and one waits for what is sent, in its order. A connection that ends
is the error of the receive from that peer.

INVARIANT (sessions): a session is what lies between two calls of close(); every rank makes equally
many. close() sends the end of this rank's session to all peers. The thread of a peer receives until
it has as many ends from it as this rank has sessions, closed or in use. So no receive is left under
way once all ranks have closed, and a rank may be several sessions ahead: it receives on from those
behind, and they receive from it when they get there. A rank that leaves ends all its sessions.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dreamcomm._torch.groups import as_ours
from dreamcomm.messages.codec import Codec
from dreamcomm.messages.endpoint import LOOK_MS, Arriving, Endpoint
from dreamcomm.messages.gloo_header import BYTES, packed, unpacked
from dreamcomm.messages.gloo_works import FOR_EVER, OfDevice, Sent
from dreamcomm.ranks.errors import RankLeft

__all__ = ["GlooEndpoint"]

LINGER = 1.0  # seconds in which the last words of a rank that leaves are taken
END, LEFT = -1, -2  # flags of headers without a message
NO_END = 1 << 62  # sessions


class GlooEndpoint(Endpoint):
    """Whole messages of each peer, received by a thread.

    Args:
        on_cpu: the group's backend of CPU tensors.
        backend_of: gives the backend of a tensor's device.
        rank, size: of the group.
        tag: the first of two: of headers, and of what follows them.
        codec: of the messages.
    """

    def __init__(
        self,
        on_cpu: Any,
        backend_of: Callable[[Tensor], Any],
        rank: int,
        size: int,
        tag: int,
        codec: Codec,
    ) -> None:
        super().__init__(rank, size)
        self._on_cpu, self._backend_of, self._tag, self._codec = on_cpu, backend_of, tag, codec
        self._changed = threading.Condition()  # guards all that follows
        self._inbox: deque[tuple[Arriving, list[Tensor]]] = deque()  # with what is to be received
        self._error: BaseException | None = None  # of a thread
        self._lost: dict[int, str] = {}  # by peer
        self._receiving: set[int] = set()  # peers
        self._closed, self._in_use = 0, False  # sessions
        self._ended = dict.fromkeys(self.peers, 0)  # by peer, its sessions
        self._headers: deque[Sent] = deque()
        self._sending: deque[Sent] = deque()  # in the order of the sends
        self._waits = False  # whether a thread waits for sends
        # At the process's end. An endpoint whose sends are under way is not collected before.
        weakref.finalize(self, _linger, self._changed, self._sending)

    @property
    def timeout(self) -> float:
        options = getattr(self._on_cpu, "wrapped_pg", self._on_cpu).options
        found = options._timeout if as_ours(self._on_cpu) is None else options.timeout
        return float(found.total_seconds())

    # Sending.

    def send_header(
        self, peer: int, key: tuple[int, ...], description: bytes, offsets: Sequence[int]
    ) -> bool:
        self._open()
        header, inside = packed(key, description)
        self._headers.append(self._post(torch.frombuffer(header, dtype=torch.uint8), peer, 0))
        return inside

    def send(self, tensor: Tensor, peer: int) -> Any:
        if tensor.is_cpu:
            return self._post(tensor, peer, 1)
        return OfDevice(self._backend_of(tensor).send([tensor], peer, self._tag + 1))

    def forget_placed(self) -> None:
        """Nothing is placed."""

    def _post(self, tensor: Tensor, peer: int, offset: int) -> Sent:
        with self._changed:
            try:
                work = self._on_cpu.send([tensor], peer, self._tag + offset)
            except RuntimeError as error:
                self._lost.setdefault(peer, str(error))
                raise
            sent = Sent(work, peer, self._changed)
            self._sending.append(sent)
            if not self._waits:
                self._waits = True
                self._start(self._wait_for_sends, "sends")
            self._changed.notify_all()
        return sent

    def _wait_for_sends(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._sending or not self._in_use)
                if not self._sending:
                    self._waits = False
                    return
                first = self._sending[0]
            error = ""
            try:
                first.work.wait(FOR_EVER)
            except RuntimeError as raised:
                error = str(raised) or "the send has failed"
            with self._changed:
                first.done, first.error = True, error
                self._sending.popleft()
                if error:
                    self._lost.setdefault(first.peer, error)
                self._changed.notify_all()

    def pending(self) -> int:
        while self._headers and self._headers[0].is_completed():
            self._headers.popleft().wait()
        return len(self._headers)

    # Receiving.

    def next(self, milliseconds: int) -> Arriving | None:
        self._open()
        with self._changed:
            if milliseconds:
                self._changed.wait_for(
                    lambda: self._inbox or self._lost or self._error, milliseconds / 1000
                )
            if self._error is not None:
                raise self._error
            if not self._inbox:
                return None
            arriving, later = self._inbox.popleft()
        for memory in later:
            work = self._backend_of(memory).recv([memory], arriving.source, self._tag + 1)
            arriving.works.append(OfDevice(work))
        return arriving

    def _open(self) -> None:
        """Uses the session."""
        if not self._in_use:
            with self._changed:
                self._in_use = True
                self._receive()

    def _receive(self) -> None:
        """Has threads receive from the peers whose sessions are behind. Under the lock."""
        for peer in self.peers:
            if self._expects(peer) and peer not in self._receiving:
                self._receiving.add(peer)
                self._start(partial(self._receive_from, peer), f"rank {peer}")

    def _expects(self, peer: int) -> bool:
        sessions = self._closed + self._in_use
        return peer not in self._lost and self._ended[peer] < sessions

    def _start(self, target: Callable[[], None], what: str) -> None:
        threading.Thread(target=target, name=f"dreamcomm messages, {what}", daemon=True).start()

    def _receive_from(self, peer: int) -> None:
        """The thread of a peer."""
        try:
            while True:
                header = unpacked(self._received(bytearray(BYTES), peer, 0))
                found = None if header.key[4] < 0 else self._message(peer, *header)
                with self._changed:
                    if found is not None:
                        self._inbox.append(found)
                    else:
                        self._ended[peer] += 1 if header.key[4] == END else NO_END
                    self._changed.notify_all()
                    if not self._expects(peer):
                        self._receiving.discard(peer)
                        return
        except RuntimeError as error:
            self._stop_receiving(peer, lost=str(error) or "the receive has failed")
        except BaseException as error:  # raised by next()
            self._stop_receiving(peer, error=error)

    def _stop_receiving(
        self, peer: int, lost: str = "", error: BaseException | None = None
    ) -> None:
        with self._changed:
            self._receiving.discard(peer)
            self._error = self._error or error
            if lost:
                self._lost.setdefault(peer, lost)
            self._changed.notify_all()

    def _received(self, data: bytearray, peer: int, offset: int) -> bytearray:
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        self._on_cpu.recv([tensor], peer, self._tag + offset).wait(FOR_EVER)
        return data

    def _message(
        self, source: int, key: tuple[int, ...], size: int, inside: bytes
    ) -> tuple[Arriving, list[Tensor]]:
        """Receives what follows a header, except into memory of a device."""
        text = inside if len(inside) == size else bytes(self._received(bytearray(size), source, 1))
        what = self._codec.decode(text, bool(key[4] & 1))
        tensors, later = [], []
        for meta in what.metas:
            tensor, memory = self._codec.memory_for(meta)
            tensors.append(tensor)
            if memory.numel() and memory.is_cpu:
                self._on_cpu.recv([memory], source, self._tag + 1).wait(FOR_EVER)
            elif memory.numel():
                later.append(memory)
        return Arriving(source, key[:4], key[4] >> 1, what, tensors, []), later

    # The end.

    def close(self, *, sends_end: bool) -> None:
        if sends_end:
            self._await_sends()
        self._end(END)

    def leave(self) -> None:
        self._end(LEFT)
        _linger(self._changed, self._sending)

    def _end(self, flags: int) -> None:
        header, _ = packed((0, 0, 0, 0, flags), b"")
        for peer in self.peers:
            with suppress(RuntimeError):  # a connection that has ended
                self._post(torch.frombuffer(header, dtype=torch.uint8), peer, 0)
        with self._changed:
            self._closed, self._in_use = self._closed + 1, False
            self._receive()
            self._changed.notify_all()

    def _await_sends(self) -> None:
        """Waits until all that was sent has been received."""
        begin = time.monotonic()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._sending, LOOK_MS / 1000):
                    break
            self.check_lost()
            if time.monotonic() - begin > self.timeout:
                raise RuntimeError(
                    f"rank {self.rank} has waited {time.monotonic() - begin:.1f} s, the group's "
                    f"timeout, for rank {self._sending[0].peer} to receive a message"
                )
        self.pending()

    # Peers.

    def has_ended(self, peer: int) -> bool:
        return False  # Gloo knows of connections alone

    def departure(self, peer: int) -> str:
        with self._changed:
            left = "it has left" if self._ended[peer] >= NO_END else ""
            return self._lost.get(peer, left)

    def end_looks(self) -> None:
        """Nothing is under way: a lost connection ends its thread."""

    def check_lost(self) -> None:
        with self._changed:
            for peer, why in self._lost.items():
                raise RankLeft(peer, why)


def _linger(changed: threading.Condition, sending: deque[Sent]) -> None:
    """Waits a moment until peers have taken what was sent."""
    with changed:
        changed.wait_for(lambda: not sending, LINGER)
