"""A process that has the parameters and their optimizer, for workers that have neither."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dreamcomm.ranks.parameters import groups_of
from dreamcomm.server.checkpoint import Checkpoint
from dreamcomm.server.connection import Connection, ServerTerms
from dreamcomm.server.groups import named, of_these
from dreamcomm.server.hub import Hub
from dreamcomm.server.layout import assign, memories
from dreamcomm.server.rendezvous import LOOK_SECONDS, Arrival, Gate
from dreamcomm.server.report import ServerReport
from dreamcomm.server.rules import Averaged, Bounded, Rule
from dreamcomm.server.settings import check_optimizer, check_server, checked_damping
from dreamcomm.server.store import expected_workers, open_store
from dreamcomm.server.weights import Weights, specs_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["ParameterServer"]

END_SECONDS = 10.0  # in which workers are sent why the server ends
LOG = logging.getLogger("dreamcomm.server")


class ParameterServer:
    """Steps an optimizer with the gradients that workers push, and gives them the weights.

    Li et al. 2014, "Scaling distributed machine learning with the parameter server". With
    ``staleness=0`` it waits for all workers, averages their gradients in the order of their ranks,
    and makes one step: the bits of training with all_reduce. With a bound above 0, or None, each
    push is a step of its own, and a worker may be that many pushes ahead of the slowest (Ho et al.
    2013) or any number (Recht et al. 2011, Dean et al. 2012).

    A server has whole parameters. Several share them by bytes: each is given all of them, and takes
    its own. Buffers, and parameters that require no gradient, stay with each process.

    Args:
        params: as torch's optimizers take them: tensors, pairs of name and tensor, or groups; on
            any device. Workers start with their values.
        optimizer_class: of torch.optim.
        staleness: 0, a bound in pushes, or None.
        damping: factor of a gradient by its lag, the number of updates that it does not know of:
            "inverse" for 1 / (1 + lag) (Zhang et al. 2016), a function, or None.
        push_scale: factor of all gradients, where each push is a step.
        workers: with staleness 0 the first step waits until so many have joined, and
            :meth:`serve` returns only when so many have been here; those of one rank count once.
            None: the rest of the job of torchrun or of init_process_group, where none observes;
            without such a job it has to be given with staleness 0, and is 1 otherwise.
        index, servers: this is server ``index`` of so many.
        name: of the servers together; workers give the same.
        store: a torch store, or "host:port" of one, which server 0 holds if no other process does.
            None: the store of the default group, or of MASTER_ADDR and MASTER_PORT.
        timeout: seconds for the store and for a worker that connects.
        defaults: the optimizer's arguments.

    Raises:
        ValueError, TypeError: an argument is wrong; the text says which.
        ServerUnreachable: the store is not there.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        staleness: int | None = 0,
        damping: str | Callable[[int], float] | None = None,
        push_scale: float = 1.0,
        workers: int | None = None,
        index: int = 0,
        servers: int = 1,
        name: str = "server",
        store: Store | str | None = None,
        timeout: float = 300.0,
        **defaults: Any,
    ) -> None:
        check_server(staleness, push_scale, index, servers, workers)
        check_optimizer(optimizer_class)
        damped = checked_damping(damping, staleness)
        groups = groups_of(params)
        names, tensors = named(groups, "ParameterServer")
        specs = specs_of(tensors, names)
        if servers > memories(specs):
            raise ValueError(
                f"ParameterServer: expected at most one server for each of {memories(specs)} "
                f"parameters, got {servers}"
            )
        mine = assign(specs, servers)[index]
        own = [tensors[number] for number in mine]
        self.optimizer = optimizer_class(of_these(groups, own), **defaults)
        self._weights = Weights(
            own, self.optimizer, [names[number] for number in mine], (index, servers)
        )
        self._workers = _workers(workers, servers, staleness)
        self._terms, self._timeout = ServerTerms(staleness, servers, tuple(specs)), timeout
        self._words = f"server {index} of {name!r}"
        opened = open_store(store, holds=index == 0, timeout=timeout)
        self._gate = Gate(
            opened, lambda: open_store(store, holds=index == 0, timeout=1.0), name, index
        )
        self._on_update: Callable[[], None] = lambda: None
        self._hub = Hub(
            self._weights,
            _rule(self._weights, staleness, self._workers, push_scale, damped),
            self._words,
            lambda: self._on_update(),
        )

    @property
    def version(self) -> int:
        """Updates so far, with those before the checkpoint that was loaded."""
        return self._weights.version

    def serve(
        self,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int = 1,
        on_update: Callable[[ParameterServer], None] | None = None,
        also: Mapping[str, Any] | None = None,
    ) -> ServerReport:
        """Answers workers until all that were here have left.

        Workers may join at any time. One that leaves or is lost no longer holds back the others; a
        warning in the log of "dreamcomm.server" says so.

        Args:
            checkpoint: a file for :meth:`state_dict`, written beside it and renamed, so that it is
                always whole. It is also written when all have left, or :meth:`stop` was called.
            every: updates between two writes.
            on_update: called after each update, while no other runs: for a learning rate's
                schedule over ``optimizer``. Workers get the weights as it leaves them.
            also: objects with a ``state_dict()``, such as that schedule, by the keys under which
                checkpoints have theirs. Load them from there, after :meth:`load_state_dict`.

        Raises:
            ValueError: a key of ``also`` is one of :meth:`state_dict`.
            Exception: what an update, ``on_update`` or a write raised. Workers get a ServerError
                with its text.
            ServerError: another server has registered under this name and index.
        """
        if self._hub.stopped:
            raise RuntimeError("ParameterServer.serve: it has ended; make a new server")
        file = None if checkpoint is None else Checkpoint(checkpoint, every, self.version)

        others = dict(also or {})
        if taken := others.keys() & self._weights.state_dict().keys():
            raise ValueError(
                f"ParameterServer.serve: expected other keys of also than {sorted(taken)}, which "
                "state_dict() has"
            )

        def state() -> dict[str, Any]:
            return self._weights.state_dict() | {key: o.state_dict() for key, o in others.items()}

        def updated() -> None:
            if on_update is not None:
                on_update(self)
            if file is not None:
                file.updated(self.version, state)

        self._on_update = updated
        self._serve_until_ended()
        if file is not None:
            file.write(self.version, state)
        return self.report()

    def _serve_until_ended(self) -> None:
        """Serves; raises the reason of an end that is an error."""
        serving: dict[threading.Thread, Arrival] = {}
        try:
            while not self._hub.stopped and not self._hub.is_deserted(self._workers):
                for thread in [one for one in serving if not one.is_alive()]:
                    serving.pop(thread).forget()
                serving |= {self._begin(arrival): arrival for arrival in self._gate.arrivals()}
                time.sleep(LOOK_SECONDS)
            self._hub.stop(_Ended("all workers have left, and the server has ended"))
        except BaseException as error:
            text = str(error) or type(error).__name__
            self._hub.stop(RuntimeError(f"the server was interrupted: {text}"))
            raise
        finally:
            self._gate.close()
            until = time.monotonic() + END_SECONDS
            for thread in serving:
                thread.join(max(until - time.monotonic(), 0.0))
        reason = self._hub.stopped
        if reason is not None and not isinstance(reason, _Ended):
            raise reason

    def stop(self) -> None:
        """Ends :meth:`serve`, from another thread or from ``on_update``. Workers get an error."""
        self._hub.stop(_Ended("the server has been stopped"))

    def close(self) -> None:
        """As :meth:`stop`; also one that has not served is no longer found by workers."""
        self.stop()
        self._gate.close()

    def report(self) -> ServerReport:
        """Updates, staleness, bytes and waits so far."""
        return self._hub.report()

    def state_dict(self) -> dict[str, Any]:
        """Version, parameters and optimizer of this server, for ``torch.save``: a copy."""
        return self._hub.under_lock(self._weights.copied_state_dict)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint; before :meth:`serve`.

        Raises:
            ValueError: it is of another model, optimizer, index or number of servers. Nothing has
                been loaded then.
        """
        self._hub.load(state)

    def _begin(self, arrival: Arrival) -> threading.Thread:
        name = f"{self._words}, worker {arrival.number}"
        thread = threading.Thread(target=self._connect, args=(arrival,), name=name, daemon=True)
        thread.start()
        return thread

    def _connect(self, arrival: Arrival) -> None:
        try:
            pair = arrival.accept(self._timeout)
        except RuntimeError as error:
            LOG.warning("%s: a worker asked, and did not connect: %s", self._words, error)
            return
        Connection(pair, self._hub, self._weights.layout, self._terms).run()


class _Ended(RuntimeError):
    """An end that is no error of the server."""


def _rule(
    weights: Weights,
    staleness: int | None,
    workers: int,
    scale: float,
    damping: Callable[[int], float] | None,
) -> Rule:
    if staleness == 0:
        return Averaged(weights, workers)
    return Bounded(weights, staleness, scale, damping)


def _workers(given: int | None, servers: int, staleness: int | None) -> int:
    workers = expected_workers(servers) if given is None else given
    if workers is None and staleness == 0:
        raise ValueError(
            "ParameterServer: a synchronous server has to know how many workers to wait for before "
            "the first step: give workers=, or start with torchrun"
        )
    return 1 if workers is None else workers
