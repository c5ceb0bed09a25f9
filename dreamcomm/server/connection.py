"""One worker's thread in a server."""

from __future__ import annotations

from typing import Any

from dreamcomm.memory import empty
from dreamcomm.server.hub import Hub, Stopped
from dreamcomm.server.layout import Flats, Layout, TensorSpec, difference
from dreamcomm.server.pair import Kind, Message, Pair, PeerLost
from dreamcomm.server.rules import Push
from dreamcomm.server.weights import Snapshot

__all__ = ["NOTE_SECONDS", "Connection"]

NOTE_SECONDS = 2.0  # how often a waiting worker is told for whom


class Connection:
    """Answers one worker until it leaves, or is lost.

    Args:
        pair: to the worker.
        hub: of the server.
        layout: of the server's parameters.
        settings: that the worker has to know.
    """

    def __init__(self, pair: Pair, hub: Hub, layout: Layout, settings: dict[str, Any]) -> None:
        self._pair, self._hub, self._layout, self._settings = pair, hub, layout, settings
        self._rank, self._observes, self._wants_gradients = -1, False, False
        self._gradients: Flats = {}

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
        except Exception as error:
            self._hub.stop(error)
            self._tell_failure(f"{type(error).__name__}: {error}")
        finally:
            self._pair.close()

    def _next(self) -> Message:
        found = self._pair.next(lambda: self._hub.stopped is not None)
        if found is None:
            raise Stopped(str(self._hub.stopped))
        return found

    def _welcome(self) -> bool:
        first = self._next()
        if first.kind != Kind.HELLO:
            raise PeerLost(f"its first message was {first.kind.name}")
        hello = first.value
        self._observes = hello["observes"]
        self._wants_gradients = hello["gradients"]
        specs = [TensorSpec(*one) for one in hello["specs"]]
        refused = difference(self._layout.specs, specs)
        if not refused and self._wants_gradients and self._settings["staleness"] != 0:
            refused = "gradients=True: only a server with staleness=0 has averaged gradients"
        if not refused:
            refused = self._hub.join(hello["rank"], self._observes)
        if refused:
            self._pair.send(Kind.REFUSED, refused)
            return False
        self._rank = -1 if self._observes else hello["rank"]
        self._pair.send(Kind.WELCOME, self._settings)
        self._send_weights(self._hub.observe().snapshot)
        return True

    def _serve_one(self) -> bool:
        message = self._next()
        kind = message.kind
        if kind == Kind.LEAVE:
            self._hub.leave(self._rank)
            return False
        if kind == Kind.PUSH and not self._observes:
            self._take(message)
            self._wait()
            self._answer(self._wants_gradients)
        elif kind == Kind.PULL:
            self._answer(False)
        else:
            raise PeerLost(f"it has sent {kind.name} out of turn")
        return True

    def _take(self, message: Message) -> None:
        # A buffer is free again when its worker pushes: the update that used it is over.
        if not self._gradients:
            self._gradients = {
                dtype: empty(size, dtype=dtype, device="cpu")
                for dtype, size in self._layout.sizes.items()
            }
        absent = self._pair.receive_flats(self._layout, message.value, self._gradients)
        self._hub.push(self._rank, Push(self._gradients, absent, message.version))

    def _wait(self) -> None:
        while waits_for := self._hub.await_turn(self._rank, NOTE_SECONDS):
            self._pair.send(Kind.WAITING, [one for one in waits_for if one >= 0])

    def _answer(self, with_gradients: bool) -> None:
        if self._observes:
            answer = self._hub.observe()
        else:
            answer = self._hub.read(self._rank, with_gradients)
        if with_gradients:
            gradients = answer.snapshot.gradients
            assert gradients is not None
            self._pair.send_flats(Kind.GRADIENTS, self._layout, gradients)
        self._send_weights(answer.snapshot, answer.staleness)

    def _send_weights(self, snapshot: Snapshot, staleness: int = 0) -> None:
        self._pair.send_flats(
            Kind.WEIGHTS, self._layout, snapshot.flats, snapshot.version, staleness
        )

    def _tell_failure(self, text: str) -> None:
        try:
            self._pair.send(Kind.FAILED, text)
        except PeerLost as error:
            self._hub.leave(self._rank, str(error))
