"""A worker of model servers: used like an optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dreamcomm.server.errors import ServerError, ServerLost
from dreamcomm.server.layout import Layout, assign
from dreamcomm.server.pair import Kind, Message, Pair, PeerLost
from dreamcomm.server.rendezvous import Visitor, next_rank, open_store
from dreamcomm.server.report import WorkerReport
from dreamcomm.server.settings import groups_of, named
from dreamcomm.server.weights import specs_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Worker"]


class _Server:
    """One server, as its worker sees it."""

    def __init__(self, index: int, numbers: list[int], layout: Layout, visitor: Visitor) -> None:
        self.index, self.numbers, self.layout, self.visitor = index, numbers, layout, visitor
        self.pair: Pair | None = None
        # It has a push that it has not answered: another server was lost in that step. Then the
        # next step does not push again, so that every worker pushes once an update.
        self.owes = False
        self.version = 0
        self.waits_for: list[int] = []


class Worker(torch.optim.Optimizer):
    """Pushes gradients to model servers and takes their weights, in place of an optimizer. ::

        optimizer = dreamcomm.server.Worker(model.parameters(), servers=1)
        for batch in data:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        optimizer.close()

    It has no optimizer's state, and no learning rate: these are the server's. The constructor
    replaces the parameters' values by the servers'. Buffers, and parameters that require no
    gradient, stay with each process.

    Args:
        params: those that the servers have, in the same order; on any device.
        servers: their number.
        store: as the servers'. None: the store of the default group, or of MASTER_ADDR and
            MASTER_PORT.
        name: that the servers have.
        rank: of this worker among the workers; averages are added in its order. None: the rank in
            the job, or the number of workers that have asked before.
        gradients: with synchronous servers :meth:`step` also puts the averaged gradients into
            ``grad``, as all_reduce would; half as many bytes more.
        observer: pushes nothing, holds back nobody: only :meth:`pull`, for evaluation.
        timeout: seconds until servers have to be there, or to answer.

    Raises:
        ServerUnreachable: a server is not there.
        ServerError: a server has refused this worker, because its parameters differ or its rank is
            taken.
        ValueError, TypeError: an argument is wrong.
    """

    def __init__(
        self,
        params: Iterable[Any],
        servers: int = 1,
        *,
        store: Store | str | None = None,
        name: str = "server",
        rank: int | None = None,
        gradients: bool = False,
        observer: bool = False,
        timeout: float = 300.0,
    ) -> None:
        if servers < 1:
            raise ValueError(f"Worker: expected at least 1 server, got {servers}")
        groups = groups_of(params)
        names, self._tensors = named(groups, "Worker")
        super().__init__(groups, {})
        specs = specs_of(self._tensors, names)
        self._given, self._name, self._timeout = store, name, timeout
        self._wants_gradients, self._observes = gradients, observer
        self._counts = WorkerReport()
        opened = open_store(store, holds=False, timeout=timeout)
        self.rank = next_rank(opened, name) if rank is None else rank
        self._servers = [
            _Server(
                index,
                numbers,
                Layout([specs[number] for number in numbers]),
                Visitor(opened, name, index),
            )
            for index, numbers in enumerate(assign(specs, servers))
        ]
        try:
            for server in self._servers:
                self._join(server)
        except BaseException:
            self.close()
            raise

    # What an optimizer does.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients, and takes the weights when the servers give them.

        Synchronous servers answer when all workers have pushed; others as soon as this worker is
        within the bound.

        Args:
            closure: computes the loss again and returns it.

        Raises:
            ServerLost: a server has ended. :meth:`reconnect` goes on.
            ServerError: a server has failed, or has not answered in time.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._observes:
            raise RuntimeError("Worker.step: an observer pushes nothing; call pull()")
        gradients = [self._gradient(number) for number in range(len(self._tensors))]
        for server in self._servers:
            if not server.owes:
                self._push(server, [gradients[number] for number in server.numbers])
        for server in self._servers:
            self._take(server, self._wants_gradients)
        self._counts.steps += 1
        return loss

    @torch.no_grad()
    def pull(self) -> None:
        """Takes the weights as they are.

        Raises:
            ServerLost, ServerError: as :meth:`step`.
        """
        for server in self._servers:
            if not server.owes:
                self._with(server, lambda pair: pair.send(Kind.PULL))
        for server in self._servers:
            self._take(server, server.owes and self._wants_gradients)

    @property
    def version(self) -> int:
        """The number of updates that the weights here have seen; of several servers the lowest."""
        return min(server.version for server in self._servers)

    @property
    def waits_for(self) -> list[int]:
        """The ranks of the workers that a server was last waiting for, as it says every 2 s."""
        return sorted({rank for server in self._servers for rank in server.waits_for})

    def report(self) -> WorkerReport:
        """Steps, bytes, waits and staleness so far."""
        return deepcopy(self._counts)

    # Coming and going.

    def reconnect(self, *, store: Store | str | None = None, timeout: float | None = None) -> int:
        """Joins the servers that are lost, when they have been started anew, and takes weights.

        Args:
            store: in place of the one that a lost server held. None: the same address again.
            timeout: seconds. None: the worker's.

        Returns:
            :attr:`version`: of the checkpoint that the new server has started from.

        Raises:
            ServerUnreachable: none has been started in time.
            ServerError: it has refused this worker.
        """
        wait = self._timeout if timeout is None else timeout
        self._given = self._given if store is None else store
        lost = [server for server in self._servers if server.pair is None]
        if lost:
            opened = open_store(self._given, holds=False, timeout=wait)
            for server in lost:
                server.visitor.meet_in(opened)
                self._join(server, wait)
        return self.version

    def close(self) -> None:
        """Leaves the servers. The weights stay as they are."""
        for server in self._servers:
            if server.pair is not None:
                with suppress(PeerLost):  # it has ended first
                    server.pair.send(Kind.LEAVE)
                _drop(server)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One server.

    def _join(self, server: _Server, timeout: float | None = None) -> None:
        server.pair = server.visitor.connect(self._timeout if timeout is None else timeout)
        hello = {
            "rank": self.rank,
            "specs": [(spec.name, spec.shape, spec.dtype) for spec in server.layout.specs],
            "gradients": self._wants_gradients,
            "observes": self._observes,
        }
        self._with(server, lambda pair: pair.send(Kind.HELLO, hello))
        found = self._next(server)
        if found.kind == Kind.REFUSED:
            _drop(server)
            raise ServerError(f"{self._words(server)} has refused this worker: {found.value}")
        with torch.no_grad():
            self._take(server, False)

    def _push(self, server: _Server, gradients: list[Tensor | None]) -> None:
        absent = [place for place, one in enumerate(gradients) if one is None]
        version = server.version
        self._with(server, lambda pair: pair.push(server.layout, gradients, absent, version))
        server.owes = True
        self._counts.pushed_bytes += server.layout.nbytes

    def _gradient(self, number: int) -> Tensor | None:
        gradient = self._tensors[number].grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise TypeError(
                f"Worker.step: parameter {number} has a gradient of layout {gradient.layout}; "
                "servers take dense ones (for an Embedding: sparse=False)"
            )
        return gradient

    def _take(self, server: _Server, with_gradients: bool) -> None:
        began = time.monotonic()
        tensors = [self._tensors[number] for number in server.numbers]
        if with_gradients:
            first = self._expect(server, Kind.GRADIENTS)
            into = [_gradient_of(tensor) for tensor in tensors]
            self._receive(server, first, into)
        first = self._expect(server, Kind.WEIGHTS)
        self._receive(server, first, tensors)
        server.version, server.owes = first.version, False
        self._counts.staleness[first.staleness] += 1
        self._counts.waited += time.monotonic() - began

    def _receive(self, server: _Server, first: Message, tensors: list[Tensor]) -> None:
        layout = server.layout
        self._with(server, lambda pair: pair.receive_into(first.kind, layout, first.value, tensors))
        self._counts.pulled_bytes += layout.nbytes

    def _expect(self, server: _Server, kind: Kind) -> Message:
        found = self._next(server)
        if found.kind != kind:
            raise ServerError(
                f"{self._words(server)} has sent {found.kind.name} where {kind.name} was to come"
            )
        return found

    def _next(self, server: _Server) -> Message:
        """The server's next message that is not about waiting."""
        until = time.monotonic() + self._timeout
        server.waits_for = []
        while True:
            found = self._with(server, lambda pair: pair.next(lambda: time.monotonic() > until))
            if found is None:
                raise ServerError(self._why_late(server))
            if found.kind == Kind.FAILED:
                _drop(server)
                raise ServerError(f"{self._words(server)} has failed: {found.value}")
            if found.kind != Kind.WAITING:
                return found  # type: ignore[no-any-return]
            server.waits_for = found.value
            if time.monotonic() > until:
                raise ServerError(self._why_late(server))

    def _why_late(self, server: _Server) -> str:
        for_whom = f"; it waits for the workers {server.waits_for}" if server.waits_for else ""
        return (
            f"{self._words(server)} has not answered worker {self.rank} within {self._timeout:g} s"
            f"{for_whom}"
        )

    def _with(self, server: _Server, act: Callable[[Pair], Any]) -> Any:
        if server.pair is None:
            raise ServerLost(
                f"{self._words(server)} is lost; call reconnect() when it has been started anew",
                server.index,
            )
        try:
            return act(server.pair)
        except PeerLost as error:
            _drop(server)
            raise ServerLost(
                f"worker {self.rank}: {self._words(server)} is lost ({error}). Start it anew from "
                "its checkpoint, under the same name, and call reconnect()",
                server.index,
            ) from error

    def _words(self, server: _Server) -> str:
        return f"server {server.index} of {self._name!r}"


def _drop(server: _Server) -> None:
    pair, server.pair = server.pair, None
    server.owes = False
    if pair is not None:
        pair.close()


def _gradient_of(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad
