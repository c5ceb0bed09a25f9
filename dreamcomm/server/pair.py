"""The messages of one server and one worker, in a group of these two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from dreamcomm.messages.messenger import LOOK_MS, Arriving, Messenger, RankLost
from dreamcomm.server.layout import Flats, Layout
from dreamcomm.server.pieces import Scatter, gathered

if TYPE_CHECKING:
    from dreamcomm._C import DreamBackend

__all__ = ["SERVER", "WORKER", "Kind", "Message", "Pair", "PeerLost"]

SERVER, WORKER = 0, 1  # ranks in the group
TAG = 1 << 20
# Bounds what a worker's memory grows by: it maps what it reads of the server's heap.
MOST_PLACED = 4 << 20


class Kind(IntEnum):
    """What a message is."""

    HELLO = 0  # a worker's rank, parameters and wishes
    WELCOME = 1  # the server's answer; weights follow
    REFUSED = 2  # why not
    PUSH = 3  # a piece of gradients
    PULL = 4  # a wish for weights
    WEIGHTS = 5  # a piece of them
    GRADIENTS = 6  # a piece of averaged gradients
    WAITING = 7  # whom the server waits for
    FAILED = 8  # why the server has stopped
    LEAVE = 9  # a worker's last message


class Message(NamedTuple):
    """A message that has arrived.

    Attributes:
        kind: what it is.
        version: of the weights, or of those that the gradients were computed with.
        staleness: how far the worker is ahead, with weights.
        value: what it holds.
    """

    kind: Kind
    version: int
    staleness: int
    value: Any


class PeerLost(Exception):
    """The other one's process has ended, or the connection to it."""


class Pair:
    """One side of a pair. For one thread at a time.

    Args:
        backend: of a group of two.
        peer: the other's rank in it.
    """

    def __init__(self, backend: DreamBackend, peer: int) -> None:
        self._backend, self._peer = backend, peer
        self._messenger = Messenger.on(backend, TAG, MOST_PLACED)
        self.transport = backend.transport

    def send(self, kind: Kind, value: Any = None, version: int = 0, staleness: int = 0) -> None:
        """Sends a message. Raises PeerLost."""
        key = (kind, version, staleness, 0)
        self._guarded(lambda: self._messenger.send(self._peer, key, value))

    def next(self, until: Callable[[], bool] | None = None) -> Message | None:
        """The next message.

        Args:
            until: looked at every 100 ms; None is given back when it is true.

        Raises:
            PeerLost: the peer is lost.
        """
        while True:
            arriving = self._guarded(lambda: self._messenger.accept(LOOK_MS))
            if arriving is not None:
                return self._read(arriving)
            if until is not None and until():
                return None

    def _read(self, arriving: Arriving) -> Message:
        value = self._guarded(lambda: self._messenger.value(arriving))
        kind, version, staleness, _ = arriving.key
        return Message(Kind(kind), version, staleness, value)

    # Tensors in pieces.

    def push(
        self, layout: Layout, tensors: Sequence[Tensor | None], absent: Sequence[int], version: int
    ) -> None:
        """Sends gradients. They must not change before the answer is here."""
        for number, piece in enumerate(layout.pieces):
            data = gathered(piece, tensors)
            value = data if number or not absent else (data, tuple(absent))
            self.send(Kind.PUSH, value, version)

    def send_flats(
        self, kind: Kind, layout: Layout, flats: Flats, version: int = 0, staleness: int = 0
    ) -> None:
        """Sends flat tensors, which must not change any more."""
        for piece in layout.pieces:
            self.send(kind, flats[piece.dtype][piece.begin : piece.end], version, staleness)

    def receive_flats(self, layout: Layout, first: Any, into: Flats) -> tuple[int, ...]:
        """Receives a push, whose first message is here; returns the absent ones' numbers."""
        absent: tuple[int, ...] = ()
        for number, piece in enumerate(layout.pieces):
            data = first if number == 0 else self._tensor(Kind.PUSH)
            if isinstance(data, tuple):
                data, absent = data
            into[piece.dtype][piece.begin : piece.end].copy_(data)
        return absent

    def receive_into(
        self, kind: Kind, layout: Layout, first: Any, tensors: Sequence[Tensor]
    ) -> None:
        """Receives weights or gradients, whose first message is here, into tensors."""
        scatter = Scatter(tensors)
        for number, piece in enumerate(layout.pieces):
            scatter.put(piece, first if number == 0 else self._tensor(kind))

    def _tensor(self, expected: Kind) -> Any:
        found = self.next()
        assert found is not None
        if found.kind != expected:
            raise PeerLost(f"it has sent {found.kind.name} where {expected.name} was to come")
        return found.value

    def close(self) -> None:
        """Ends the pair. What is under way goes on, if the peer lives."""
        with suppress(RuntimeError, RankLost):  # the peer has ended, which no longer matters
            self._messenger.drain()
            self._messenger.close()
        self._backend.shutdown()

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except RankLost:
            raise PeerLost("its process has ended") from None
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
