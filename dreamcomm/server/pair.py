"""The messages of one server and one worker, in a group of these two."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from dreamcomm.messages.channel import KeyedChannel
from dreamcomm.messages.endpoint import LOOK_MS, Arriving
from dreamcomm.messages.over import messenger_on
from dreamcomm.ranks import tags
from dreamcomm.ranks.errors import RankLeft, RankLost
from dreamcomm.server.layout import Flats, Layout
from dreamcomm.server.pieces import Gather, Scatter

if TYPE_CHECKING:
    from dreamcomm._C import DreamBackend

__all__ = ["SERVER", "WORKER", "Kind", "Message", "Pair", "PeerLost", "split_absent"]

SERVER, WORKER = 0, 1  # ranks in the group
# Bounds what a worker's memory grows by: it maps what it reads of the server's heap.
MOST_PLACED = 4 << 20


class Kind(IntEnum):
    """What a message is."""

    HELLO = 0  # a worker's rank, parameters and wishes
    WELCOME = 1  # the server's answer; weights follow
    REFUSED = 2  # why not
    PUSH = 3  # a piece of gradients
    SKIP = 4  # instead of a push: this worker has no part in the update
    PULL = 5  # a wish for weights
    WEIGHTS = 6  # a piece of them
    GRADIENTS = 7  # a piece of averaged gradients
    WAITING = 8  # whom the server waits for
    FAILED = 9  # why the server has stopped
    LEAVE = 10  # a worker's last message


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


class Pair(KeyedChannel):
    """One side of a pair, which takes messages in their order. For one thread at a time.

    Args:
        backend: of a group of two.
        peer: the other's rank in it.
    """

    def __init__(self, backend: DreamBackend, peer: int) -> None:
        super().__init__(messenger_on(backend, tags.SERVER.first, MOST_PLACED))
        self._backend, self._peer = backend, peer
        self._ahead: deque[Arriving] = deque()
        self.transport = backend.transport

    def send(self, kind: Kind, value: Any = None, version: int = 0, staleness: int = 0) -> None:
        """Sends a message. Raises PeerLost."""
        key = (kind, version, staleness, 0)
        self._guarded(lambda: self.messenger.send(self._peer, key, value))

    def next(self, until: Callable[[], bool] | None = None) -> Message | None:
        """The next message.

        Args:
            until: looked at every 100 ms; None is given back when it is true.

        Raises:
            PeerLost: the peer is lost.
        """
        while not self._ahead:
            if not self._guarded(lambda: self.take_next(LOOK_MS)):
                self.release()
                if until is not None and until():
                    return None
        return self._read(self._ahead.popleft())

    def look(self) -> Kind | None:
        """The kind of the message that :meth:`next` will give, if it is here already.

        Raises:
            PeerLost: the peer is lost.
        """
        if not self._ahead and not self._guarded(lambda: self.take_next(0)):
            self._guarded(self.messenger.check_lost)
        return Kind(self._ahead[0].key[0]) if self._ahead else None

    def release(self) -> None:
        """Frees what was sent and taken. An answer shows that all of it was."""
        self._guarded(self.messenger.forget_sent)

    def last_words(self) -> str | None:
        """Why a lost peer has stopped, if it said so before."""
        with suppress(RuntimeError, RankLost):
            while self._ahead or self.take_next(0):
                arriving = self._ahead.popleft()
                if arriving.key[0] == Kind.FAILED:
                    return str(self.messenger.value(arriving))
        return None

    def keeps(self, arriving: Arriving) -> bool:
        self._ahead.append(arriving)
        return False

    def described(self, key: tuple[int, ...]) -> str:
        return Kind(key[0]).name

    def _read(self, arriving: Arriving) -> Message:
        value = self._guarded(lambda: self.messenger.value(arriving))
        kind, version, staleness, _ = arriving.key
        return Message(Kind(kind), version, staleness, value)

    # Tensors in pieces.

    def push(
        self, layout: Layout, tensors: Sequence[Tensor | None], absent: Sequence[int], version: int
    ) -> None:
        """Sends gradients. They must not change before the answer is here."""
        gather = Gather(tensors)
        for number, piece in enumerate(layout.pieces):
            value = _with_absent(gather.get(piece), () if number else absent)
            self.send(Kind.PUSH, value, version)

    def send_flats(
        self,
        kind: Kind,
        layout: Layout,
        flats: Flats,
        version: int = 0,
        staleness: int = 0,
        absent: Sequence[int] = (),
    ) -> None:
        """Sends flat tensors, which must not change any more."""
        for number, piece in enumerate(layout.pieces):
            data = flats[piece.dtype][piece.begin : piece.end]
            self.send(kind, _with_absent(data, () if number else absent), version, staleness)

    def receive_flats(self, layout: Layout, first: Message, into: Flats) -> tuple[int, ...]:
        """Receives a push, whose first message is here; returns the absent ones' numbers."""
        data, absent = split_absent(first.value)
        for number, piece in enumerate(layout.pieces):
            data = data if number == 0 else self._following(first.kind, None)
            into[piece.dtype][piece.begin : piece.end].copy_(data)
        return absent

    def receive_into(
        self, layout: Layout, first: Message, tensors: Sequence[Tensor], patience: float
    ) -> None:
        """Receives weights or gradients into tensors; their first message is here.

        Args:
            patience: seconds in which each further message has to be here.
        """
        scatter = Scatter(tensors)
        data, _ = split_absent(first.value)
        for number, piece in enumerate(layout.pieces):
            scatter.put(piece, data if number == 0 else self._following(first.kind, patience))

    def expect(self, kind: Kind, patience: float | None) -> Message:
        """The next message, which has to be of this kind and here within so many seconds."""
        until = None if patience is None else time.monotonic() + patience
        found = self.next(lambda: until is not None and time.monotonic() > until)
        if found is None:
            raise PeerLost(f"it has stopped in the middle of a message for {patience:g} s")
        if found.kind != kind:
            raise PeerLost(f"it has sent {found.kind.name} where {kind.name} was to come")
        return found

    def _following(self, kind: Kind, patience: float | None) -> Any:
        return self.expect(kind, patience).value

    def close(self) -> None:
        """Ends the pair. What is under way goes on, if the peer lives and receives it."""
        with suppress(RuntimeError, RankLost):  # the peer has ended, which no longer matters
            self.drain()
        with suppress(RuntimeError, RankLost):
            self.messenger.leave()
        self._backend.shutdown()

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except RankLeft:
            raise PeerLost("it has closed the connection") from None
        except RankLost:
            raise PeerLost("its process has ended") from None
        except RuntimeError as error:
            raise PeerLost(str(error)) from error


def _with_absent(data: Tensor, absent: Sequence[int]) -> Any:
    """What the first piece of gradients holds: the parameters without one, too, if there are."""
    return (data, tuple(absent)) if absent else data


def split_absent(value: Any) -> tuple[Tensor, tuple[int, ...]]:
    """A first piece, and the parameters without a gradient."""
    return value if isinstance(value, tuple) else (value, ())
