"""One worker's thread in a server."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dreamcomm.memory import empty
from dreamcomm.server.hub import Hub, Stopped
from dreamcomm.server.layout import Flats, Layout, TensorSpec, difference
from dreamcomm.server.pair import Kind, Message, Pair, PeerLost
from dreamcomm.server.rules import Push

__all__ = ["Connection", "ServerTerms"]

LOOK_SECONDS = 0.1  # how often a worker that waits is seen to live
NOTE_SECONDS = 2.0  # how often it gets the names of those that it waits for, at least


@dataclass(frozen=True)
class ServerTerms:
    """What workers have to agree on with a server.

    Attributes:
        staleness: the bound; 0: synchronous.
        servers: their number.
        specs: the parameters of all servers.
    """

    staleness: int | None
    servers: int
    specs: tuple[TensorSpec, ...]


class Connection:
    """Answers one worker until it leaves, or is lost.

    Args:
        pair: to the worker.
        hub: of the server.
        layout: of the server's parameters.
        terms: of the server.
    """

    def __init__(self, pair: Pair, hub: Hub, layout: Layout, terms: ServerTerms) -> None:
        self._pair, self._hub, self._layout, self._terms = pair, hub, layout, terms
        self._rank, self._observes, self._wants_gradients = -1, False, False
        self._gradients: Flats = {}
        self._note_seconds = NOTE_SECONDS

    def run(self) -> None:
        """The thread's work. Errors of the server reach its workers and stop it."""
        try:
            if self._welcome():
                while self._serve_one():
                    pass
        except PeerLost as error:
            self._hub.leave(self._rank, str(error))
        except Stopped as error:
            self._tell_failure(str(error))
        except BaseException as error:  # serve() raises it, in its own thread
            self._hub.stop(error)
            self._tell_failure(f"{type(error).__name__}: {error}")
        finally:
            self._pair.close()

    def _next(self) -> Message:
        found = self._pair.next(lambda: self._hub.stopped is not None)
        if found is None:
            self._hub.raise_if_stopped()
        assert found is not None
        return found

    # The first message.

    def _welcome(self) -> bool:
        first = self._next()
        if first.kind != Kind.HELLO:
            raise PeerLost(f"its first message was {first.kind.name}")
        hello = first.value
        rank, self._observes = hello["rank"], hello["observes"]
        self._wants_gradients = hello["gradients"]
        self._note_seconds = min(NOTE_SECONDS, hello["timeout"] / 4)  # before it stops waiting
        specs = [TensorSpec(*one) for one in hello["specs"]]
        refused = self._why_refused(hello["servers"], specs) or self._hub.join(rank, self._observes)
        if refused:
            self._pair.send(Kind.REFUSED, refused)
            return False
        self._rank = -1 if self._observes else rank
        self._pair.send(Kind.WELCOME, {"staleness": self._terms.staleness})
        self._answer(False)
        return True

    def _why_refused(self, servers: int, specs: list[TensorSpec]) -> str:
        if servers != self._terms.servers:
            return f"it counts on {servers} servers, and there are {self._terms.servers}"
        if self._wants_gradients and self._terms.staleness != 0:
            return "gradients=True: only a server with staleness=0 has averaged gradients"
        return difference(self._terms.specs, specs)

    # All others.

    def _serve_one(self) -> bool:
        message = self._next()
        self._pair.release()
        kind = message.kind
        if kind == Kind.LEAVE:
            self._hub.leave(self._rank)
            return False
        if kind == Kind.PUSH and not self._observes:
            self._take(message)
            self._answer_in_turn(self._wants_gradients)
        elif kind == Kind.SKIP and not self._observes:
            self._hub.skip(self._rank)
            self._answer_in_turn(False)
        elif kind == Kind.PULL:
            self._answer(False)
        else:
            raise PeerLost(f"it has sent {kind.name} out of turn")
        return True

    def _take(self, message: Message) -> None:
        from dreamcomm import _C

        # A buffer is free again when its worker pushes: the update that used it is over. Optimizers
        # may keep a gradient, which is a view of it.
        if not self._gradients or not all(map(_C.owns_memory, self._gradients.values())):
            self._gradients = {
                dtype: empty(size, dtype=dtype, device="cpu")
                for dtype, size in self._layout.sizes.items()
            }
        absent = self._pair.receive_flats(self._layout, message, self._gradients)
        self._hub.push(self._rank, Push(self._gradients, absent, message.version))

    def _answer_in_turn(self, with_gradients: bool) -> None:
        """Answers when the worker may read. One that leaves before gets no answer."""
        noted = time.monotonic()
        while waiting := self._hub.await_turn(self._rank, LOOK_SECONDS):
            if self._pair.look() == Kind.LEAVE:
                return
            if time.monotonic() - noted >= self._note_seconds:
                self._pair.send(Kind.WAITING, (waiting.ranks, waiting.missing))
                noted = time.monotonic()
        self._answer(with_gradients)

    def _answer(self, with_gradients: bool) -> None:
        if self._observes:
            answer = self._hub.observe()
        else:
            answer = self._hub.read(self._rank, with_gradients)
        if with_gradients:
            gradients, absent = answer.snapshot.gradients, answer.snapshot.absent
            assert gradients is not None
            self._pair.send_flats(Kind.GRADIENTS, self._layout, gradients, absent=absent)
        flats, version = answer.snapshot.flats, answer.snapshot.version
        self._pair.send_flats(Kind.WEIGHTS, self._layout, flats, version, answer.staleness)

    def _tell_failure(self, text: str) -> None:
        try:
            self._pair.send(Kind.FAILED, text)
        except PeerLost as error:
            self._hub.leave(self._rank, str(error))
