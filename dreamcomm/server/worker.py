"""A worker of model servers: used like an optimizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from dreamcomm.ranks.parameters import groups_of
from dreamcomm.server.errors import ServerError
from dreamcomm.server.groups import PlainGroup, check_gradients, named
from dreamcomm.server.layout import Layout, assign, memories
from dreamcomm.server.one_thread import one_thread
from dreamcomm.server.pair import Kind
from dreamcomm.server.remote import Progress, Remote
from dreamcomm.server.rendezvous import Visitor
from dreamcomm.server.report import WorkerReport
from dreamcomm.server.settings import check_worker
from dreamcomm.server.store import next_rank, open_store
from dreamcomm.server.weights import specs_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Worker"]


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
    gradient, stay with each process. A worker is for one thread at a time.

    Args:
        params: those that the servers have, in the same order; on any device.
        servers: their number.
        store: as the servers'. None: the store of the default group, or of MASTER_ADDR and
            MASTER_PORT.
        name: that the servers have.
        rank: of this worker among the workers, from 0 on; averages are added in its order. None:
            the rank in the job, or the number of workers that have asked before.
        gradients: with synchronous servers :meth:`step` also puts the averaged gradients into
            ``grad``, as the servers' optimizers got them, so after hooks that clip; half as many
            bytes more.
        observer: pushes nothing, holds back no worker: only :meth:`pull`, for evaluation. It is no
            worker of the job, so servers that it looks at have to be given ``workers``.
        timeout: seconds until servers have to be there, or to answer.

    Raises:
        ServerUnreachable: a server is not there.
        ServerError: a server has refused this worker, because its parameters differ or its rank is
            taken.
        ValueError, TypeError: an argument is wrong.
    """

    _is_complete = False

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
        groups = groups_of(params)
        names, self._tensors = named(groups, "Worker")
        self._specs = specs_of(self._tensors, names, "Worker")
        check_worker(servers, memories(self._specs), rank, timeout)
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = [PlainGroup(group) for group in self.param_groups]
        self._is_complete = True
        self._in_call = threading.RLock()
        self._given, self._timeout, self._counts = store, timeout, WorkerReport()
        self._wants_gradients, self._observes = gradients, observer
        opened = open_store(store, holds=False, timeout=timeout)
        self.rank = -1 if observer else next_rank(opened, name) if rank is None else rank
        self._servers = self._remotes(servers, name, opened)
        try:
            self._join(self._servers, timeout)
        except BaseException:
            self.close()
            raise

    def _remotes(self, servers: int, name: str, store: Store) -> list[Remote]:
        return [
            Remote(
                index,
                name,
                self.rank,
                [self._tensors[number] for number in numbers],
                Layout([self._specs[number] for number in numbers]),
                Visitor(store, self._reopen, name, index),
                self._counts,
                self._timeout,
            )
            for index, numbers in enumerate(assign(self._specs, servers))
        ]

    def _reopen(self, timeout: float) -> Store:
        return open_store(self._given, holds=False, timeout=timeout)

    # What an optimizer does.

    @one_thread
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Pushes the gradients, and takes the weights when the servers give them.

        Synchronous servers answer when all workers have pushed; others as soon as this worker is
        within the bound. The call after one that failed goes on with the same step: it pushes
        only to servers that have not received that push, and others do not get the gradients of
        now. So compute them after :attr:`version` has grown, as :meth:`reconnect` shows.

        Args:
            closure: computes the loss again and returns it.

        Raises:
            ServerLost: a server has ended. :meth:`reconnect` goes on.
            ServerError: a server has failed, or has not answered in time. The next call of a worker
                that was not answered takes the answer.
            TypeError: a gradient is not dense. Nothing has been pushed then.
            RuntimeError: the groups have other parameters or shapes than the servers, as after a
                layer was unfrozen. Nothing has been pushed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._observes:
            raise RuntimeError("Worker.step: an observer pushes nothing; call pull()")
        check_gradients(self.param_groups, self._tensors, self._specs)
        for server in self._servers:
            if server.progress is Progress.BEGINS:
                server.push()
        for server in self._servers:
            if server.progress is Progress.PUSHED:
                server.take_pushed(self._wants_gradients)
        self._finish()
        return loss

    @one_thread
    @torch.no_grad()
    def pull(self) -> None:
        """Takes the weights as they are.

        Raises:
            ServerLost, ServerError: as :meth:`step`.
        """
        for server in self._servers:
            server.ask()
        for server in self._servers:
            if server.progress is Progress.PUSHED:
                server.take_pushed(self._wants_gradients)
            server.take_asked()
        self._finish()

    def _finish(self) -> None:
        """Ends a step that all servers have answered."""
        if all(server.progress is Progress.ANSWERED for server in self._servers):
            self._counts.steps += 1
            for server in self._servers:
                server.progress = Progress.BEGINS
            self._level()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses parameters after the first ones, because servers do not have them.

        Raises:
            RuntimeError: always.
        """
        if self._is_complete:
            raise RuntimeError(
                "Worker.add_param_group: the servers' parameters are those they were made with; "
                "make new servers and workers for others"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a Worker, in which there is nothing.

        Raises:
            ValueError: it is an optimizer's: that is the server's to load.
        """
        if state_dict.get("state"):
            raise ValueError(
                "Worker.load_state_dict: a Worker has no state; load it by "
                "ParameterServer.load_state_dict"
            )

    @property
    def version(self) -> int:
        """The number of updates that the weights here have seen; of several servers the lowest."""
        return min(server.version for server in self._servers)

    @property
    def waits_for(self) -> list[int]:
        """The workers that servers were waiting for, as they last said, every 2 s or sooner."""
        return sorted({rank for server in self._servers for rank in server.waits_for})

    def report(self) -> WorkerReport:
        """Steps, bytes, waits and staleness so far."""
        return deepcopy(self._counts)

    # Joining and leaving.

    @one_thread
    def reconnect(self, *, store: Store | str | None = None, timeout: float | None = None) -> int:
        """Joins the servers that are lost, when they have been started anew, and takes weights.

        Afterwards a step that has failed is over if :attr:`version` has grown. If not, another
        ``step()`` goes on with it, with the gradients as they are::

            while optimizer.version == before:
                try:
                    optimizer.step()
                except ServerLost:
                    optimizer.reconnect()

        Args:
            store: in place of the one that a lost server held. None: the same address again.
            timeout: seconds. None: the worker's.

        Returns:
            :attr:`version`: of the checkpoint that the new server has started from.

        Raises:
            ServerUnreachable: none has been started in time.
            ServerError: it has refused this worker, or synchronous servers were started from
                checkpoints of different versions.
        """
        wait = self._timeout if timeout is None else timeout
        if store is not None:
            self._given = store
            opened = self._reopen(wait)
            for server in self._servers:
                server.visitor.meet_in(opened)
        lost = [server for server in self._servers if not server.is_here]
        if lost:
            self._join(lost, wait)
        return self.version

    @one_thread
    def close(self) -> None:
        """Leaves the servers. The weights stay as they are."""
        for server in self._servers:
            server.leave()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, servers: list[Remote], timeout: float) -> None:
        hello = {
            "rank": self.rank,
            "servers": len(self._servers),
            "specs": [(one.name, one.shape, one.dtype, one.tied_to) for one in self._specs],
            "gradients": self._wants_gradients,
            "observes": self._observes,
            "timeout": self._timeout,
        }
        in_step = any(server.progress is not Progress.BEGINS for server in self._servers)
        others = [server for server in self._servers if server not in servers]
        for server in servers:
            server.join(hello, timeout, in_step)
            if any(other.synchronous and server.version < other.base for other in others):
                self._refuse_versions()
        self._finish()
        if all(server.progress is Progress.BEGINS for server in self._servers):
            self._level()

    def _level(self) -> None:
        """Goes on from one update on all synchronous servers.

        Others may have been between the updates of two servers when this worker joined these. It
        has no part in the update of one that is behind. None can be further ahead, because those
        wait for this worker already.
        """
        if self._observes or not self._servers[0].synchronous:
            return
        newest = max(server.version for server in self._servers)
        for server in self._servers:
            if server.version == newest - 1:
                server.ask(Kind.SKIP)
        for server in self._servers:
            server.take_asked()
        if self.version < newest:
            self._refuse_versions()

    def _refuse_versions(self) -> None:
        versions = [server.version for server in self._servers]
        self.close()
        raise ServerError(
            f"worker {self.rank}: the synchronous servers are at the versions {versions}. Start "
            "all of them from checkpoints of one version, and call reconnect()"
        )
