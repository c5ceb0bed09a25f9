"""One server, as its worker sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from dreamcomm.server.errors import ServerError, ServerLost
from dreamcomm.server.layout import Layout
from dreamcomm.server.pair import Kind, Message, Pair, PeerLost, split_absent
from dreamcomm.server.rendezvous import Visitor
from dreamcomm.server.report import WorkerReport

__all__ = ["Progress", "Remote"]


class Progress(Enum):
    """How far a worker's step is with one server."""

    BEGINS = auto()
    PUSHED = auto()
    ANSWERED = auto()


class Remote:
    """The connection to one server, and how far the worker's step is with it.

    INVARIANT: at most one request is not answered, and it is answered before the next is sent.

    Args:
        index: of the server.
        name: of the servers together.
        rank: of the worker.
        tensors: the parameters that the server has.
        layout: of these.
        visitor: finds the server.
        counts: where to count bytes, waits and staleness.
        timeout: seconds until the server has to answer.
    """

    def __init__(
        self,
        index: int,
        name: str,
        rank: int,
        tensors: Sequence[Tensor],
        layout: Layout,
        visitor: Visitor,
        counts: WorkerReport,
        timeout: float,
    ) -> None:
        self.index, self.rank, self.visitor = index, rank, visitor
        self.progress, self.version, self.synchronous = Progress.BEGINS, 0, False
        self.waits_for: list[int] = []
        self._words = f"server {index} of {name!r}"
        self._tensors, self._layout, self._counts = tensors, layout, counts
        self._timeout = timeout
        self._pair: Pair | None = None
        self._why_none = "has not been joined"
        self._asked = False  # for weights, without a push

    @property
    def is_here(self) -> bool:
        """Whether there is a connection."""
        return self._pair is not None

    # Joining and leaving.

    @property
    def base(self) -> int:
        """The version that the worker's step began with here."""
        return self.version - (self.progress is Progress.ANSWERED)

    def join(self, hello: dict[str, Any], timeout: float, in_step: bool) -> None:
        """Connects, and takes the weights.

        A synchronous server that has made the update of the worker's step is done with it, whether
        the push was part of it or not. Otherwise the step has to push again.

        Args:
            hello: what the worker says of itself.
            timeout: seconds until the server has to be there.
            in_step: the worker has begun a step with this or another server.
        """
        before = self.base
        try:
            self._pair = self.visitor.connect(timeout)
            self._greet(hello)
        except BaseException:
            self.visitor.forget()
            self._leave("has not been joined; call reconnect()")
            raise
        has_stepped = in_step and self.synchronous and self.version > before
        self.progress = Progress.ANSWERED if has_stepped else Progress.BEGINS

    def _greet(self, hello: dict[str, Any]) -> None:
        self._with(lambda pair: pair.send(Kind.HELLO, hello))
        found = self._next()
        if found.kind == Kind.REFUSED:
            raise ServerError(f"{self._words} has refused this worker: {found.value}")
        self.synchronous = found.value["staleness"] == 0
        self._with(lambda pair: self._take(pair, False))

    def leave(self) -> None:
        """Ends the connection. The server goes on without this worker."""
        self._leave("was left by close()")
        self.progress = Progress.BEGINS

    # Requests, each with its answer.

    # An interrupt at any place drops the connection, so what they note is noted inside of _with(),
    # and before a message is sent.

    def push(self) -> None:
        """Sends the gradients."""
        self.take_asked()
        gradients = [tensor.grad for tensor in self._tensors]
        absent = [place for place, one in enumerate(gradients) if one is None]

        def send(pair: Pair) -> None:
            self.progress = Progress.PUSHED
            pair.push(self._layout, gradients, absent, self.version)

        self._with(send)
        self._counts.pushed_bytes += self._layout.nbytes

    def take_pushed(self, with_gradients: bool) -> None:
        """Takes the answer to a push."""
        self._with(lambda pair: self._take(pair, with_gradients, answers=True))

    def ask(self, kind: Kind = Kind.PULL) -> None:
        """Asks for weights, if nothing is to be answered already; SKIP: for the next ones."""

        def send(pair: Pair) -> None:
            self._asked = True
            pair.send(kind)

        if not self._asked and self.progress is not Progress.PUSHED:
            self._with(send)

    def take_asked(self) -> None:
        """Takes the weights that were asked for."""
        if self._asked:
            self._with(lambda pair: self._take(pair, False))

    def _take(self, pair: Pair, with_gradients: bool, answers: bool = False) -> None:
        began = time.monotonic()
        try:
            version = self._receive(pair, self._next(), with_gradients)
            pair.release()
        finally:
            self._counts.waited += time.monotonic() - began
        if answers:
            self.progress = Progress.ANSWERED
        self.version, self._asked = version, False

    @torch.no_grad()
    def _receive(self, pair: Pair, first: Message, with_gradients: bool) -> int:
        kind = Kind.GRADIENTS if with_gradients else Kind.WEIGHTS
        if first.kind != kind:
            raise PeerLost(f"it has sent {first.kind.name} where {kind.name} was to come")
        if with_gradients:
            into = [_gradient_of(tensor) for tensor in self._tensors]
            pair.receive_into(self._layout, first, into, self._timeout)
            for number in split_absent(first.value)[1]:
                self._tensors[number].grad = None
            self._counts.pulled_bytes += self._layout.nbytes
            first = pair.expect(Kind.WEIGHTS, self._timeout)
        pair.receive_into(self._layout, first, self._tensors, self._timeout)
        self._counts.pulled_bytes += self._layout.nbytes
        self._counts.staleness[first.staleness] += 1
        return first.version

    # Messages.

    def _next(self) -> Message:
        """The server's next message that is not about waiting.

        Raises:
            ServerError: there is none in time, and the request is still to be answered.
        """
        until = time.monotonic() + self._timeout
        self.waits_for, missing = [], 0
        while True:
            found = self._with(lambda pair: pair.next(lambda: time.monotonic() > until))
            if found is not None and found.kind == Kind.FAILED:
                self._drop("has failed")
                raise ServerError(f"{self._words} has failed: {found.value}")
            if found is not None and found.kind != Kind.WAITING:
                return found  # type: ignore[no-any-return]
            if found is not None:
                self.waits_for, missing = found.value
            if time.monotonic() > until:
                raise ServerError(self._why_late(missing))

    def _why_late(self, missing: int) -> str:
        for_whom = ""
        if self.waits_for:
            for_whom = f"; it waits for the workers {self.waits_for}"
        elif missing:
            for_whom = f"; it waits for {missing} more workers to join before the first update"
        return (
            f"{self._words} has not answered worker {self.rank} within {self._timeout:g} s"
            f"{for_whom}"
        )

    def _with(self, act: Callable[[Pair], Any]) -> Any:
        if self._pair is None:
            raise ServerLost(f"worker {self.rank}: {self._words} {self._why_none}", self.index)
        try:
            return act(self._pair)
        except ServerError:
            raise
        except PeerLost as error:
            said = self._pair.last_words()
            if said is not None:
                self._drop("has failed")
                raise ServerError(f"{self._words} has failed: {said}") from error
            self._drop("is lost; call reconnect() when it has been started anew")
            raise ServerLost(
                f"worker {self.rank}: {self._words} is lost ({error}). Start it anew from its "
                "checkpoint, under the same name, and call reconnect()",
                self.index,
            ) from error
        except BaseException:
            # Half a message may be left, so what follows it would be mistaken for another.
            self.visitor.forget()
            self._leave("was left in the middle of a message; call reconnect()")
            raise

    def _leave(self, why: str) -> None:
        if self._pair is not None:
            with suppress(PeerLost):  # it has ended first
                self._pair.send(Kind.LEAVE)
        self._drop(why)

    def _drop(self, why: str) -> None:
        pair, self._pair, self._asked, self._why_none = self._pair, None, False, why
        if pair is not None:
            pair.close()


def _gradient_of(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad
