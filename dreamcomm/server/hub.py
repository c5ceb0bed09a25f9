"""What the threads of a server share: the weights, the rule, and who is here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dreamcomm.server.report import ServerReport, WorkerCounts
from dreamcomm.server.rules import Push, Rule
from dreamcomm.server.weights import Snapshot, Weights

__all__ = ["Answer", "Hub", "Stopped", "Waiting"]

LEAVE_SECONDS = 2.0  # in which a lost worker is noticed


class Stopped(Exception):
    """The server has stopped, and why."""


@dataclass(frozen=True)
class Waiting:
    """What a worker waits for.

    Attributes:
        ranks: the workers that have to push.
        missing: the number of workers that have to join.
    """

    ranks: list[int]
    missing: int


@dataclass(frozen=True)
class Answer:
    """Weights for a worker.

    Attributes:
        snapshot: to send.
        staleness: how far the worker is ahead of the slowest.
    """

    snapshot: Snapshot
    staleness: int


class Hub:
    """A server's state, behind one lock.

    Args:
        weights: of the server.
        rule: when they change.
        name: of the server in logs.
        on_update: called after each update, under the lock.
    """

    def __init__(
        self, weights: Weights, rule: Rule, name: str, on_update: Callable[[], None]
    ) -> None:
        self._weights, self._rule, self._name, self._on_update = weights, rule, name, on_update
        self._first_version = weights.version
        self._changed = threading.Condition()
        self._counts: dict[int, WorkerCounts] = {}
        self._here: set[int] = set()
        self._joined: set[int] = set()
        self._stopped: BaseException | None = None
        self._log = logging.getLogger("dreamcomm.server")

    # The end.

    def stop(self, reason: BaseException) -> None:
        """Ends all waits; connections tell their workers why. The first reason counts."""
        with self._changed:
            self._stopped = self._stopped or reason
            self._changed.notify_all()

    @property
    def stopped(self) -> BaseException | None:
        """The reason that was given to :meth:`stop`, or None."""
        return self._stopped

    def is_deserted(self, workers: int) -> bool:
        """Whether so many workers, of different ranks, have been here, and none is left."""
        with self._changed:
            return len(self._joined) >= workers and not self._here

    # Workers.

    def join(self, rank: int, observes: bool) -> str:
        """Adds a worker; returns why it is refused, or "".

        Raises:
            Stopped: the server has.
        """
        with self._changed:
            self.raise_if_stopped()
            if observes:
                return ""
            # One that was killed and started again may be faster than the end of its connection.
            if not self._changed.wait_for(lambda: rank not in self._here, LEAVE_SECONDS):
                return (
                    f"rank {rank} is taken by a worker that is here; give each worker another rank="
                )
            self._here.add(rank)
            self._joined.add(rank)
            self._counts.setdefault(rank, WorkerCounts()).state = "here"
            self._rule.join(rank)
            self._changed.notify_all()
        self._log.info("%s: worker %d has joined", self._name, rank)
        return ""

    def leave(self, rank: int, lost: str = "") -> None:
        """Removes a worker, which no longer holds back the others."""
        with self._changed:
            if rank not in self._here:
                return
            self._here.discard(rank)
            self._counts[rank].state = f"lost: {lost}" if lost else "left"
            self._updating(lambda: self._rule.leave(rank))
        if lost:
            self._log.warning(
                "%s: worker %d is lost (%s); the others go on without it", self._name, rank, lost
            )
        else:
            self._log.info("%s: worker %d has left", self._name, rank)

    def push(self, rank: int, push: Push) -> None:
        """Takes a worker's gradients. Raises Stopped if the server has."""
        with self._changed:
            self.raise_if_stopped()
            counts = self._counts[rank]
            counts.pushes += 1
            counts.pushed_bytes += self._weights.layout.nbytes
            self._updating(lambda: self._rule.push(rank, push))

    def skip(self, rank: int) -> None:
        """A worker has no part in the next update. Raises Stopped if the server has."""
        with self._changed:
            self.raise_if_stopped()
            self._updating(lambda: self._rule.skip(rank))

    def _updating(self, act: Callable[[], None]) -> None:
        """Runs what may update the weights. An error stops the server."""
        version = self._weights.version
        try:
            act()
            if self._weights.version != version:
                self._on_update()
        except BaseException as error:  # serve() raises it, in its own thread
            self._stopped = self._stopped or error
        self._changed.notify_all()

    # Readers.

    def await_turn(self, rank: int, patience: float) -> Waiting | None:
        """Waits until a worker may have weights, or for so many seconds.

        Returns:
            What it still waits for; None: it may read.

        Raises:
            Stopped: the server has.
        """
        began = time.monotonic()
        with self._changed:
            may = self._changed.wait_for(
                lambda: self._stopped is not None or self._rule.may_pull(rank), patience
            )
            self._counts[rank].waited += time.monotonic() - began
            self.raise_if_stopped()
            return None if may else Waiting(self._rule.waits_for(rank), self._rule.missing())

    def read(self, rank: int, with_gradients: bool) -> Answer:
        """The weights as they are, for a worker that may have them."""
        with self._changed:
            self.raise_if_stopped()
            snapshot = self._weights.snapshot()
            counts = self._counts[rank]
            counts.pulls += 1
            copies = 2 if with_gradients and snapshot.gradients is not None else 1
            counts.pulled_bytes += copies * self._weights.layout.nbytes
            return Answer(snapshot, self._rule.clocks.read(rank))

    def observe(self) -> Answer:
        """The weights as they are, for one that pushes nothing."""
        with self._changed:
            self.raise_if_stopped()
            return Answer(self._weights.snapshot(), 0)

    def raise_if_stopped(self) -> None:
        """Raises Stopped if the server has."""
        if self._stopped is not None:
            raise Stopped(_words_of(self._stopped))

    # Looking on.

    def load(self, state: dict[str, Any]) -> None:
        """Loads weights and optimizer. Raises ValueError for others, or with workers here."""
        with self._changed:
            if self._joined:
                raise ValueError("ParameterServer.load_state_dict: workers are here already")
            self._weights.load_state_dict(state)
            self._first_version = self._weights.version

    def report(self) -> ServerReport:
        """Counts so far."""
        with self._changed:
            return ServerReport(
                self._weights.version - self._first_version,
                self._weights.version,
                dict(self._rule.clocks.staleness),
                dict(self._rule.lags),
                {rank: replace(one) for rank, one in self._counts.items()},
            )

    def under_lock(self, act: Callable[[], Any]) -> Any:
        """Runs something while no update runs."""
        with self._changed:
            return act()


def _words_of(reason: BaseException) -> str:
    """What workers are told. The text of other errors, such as a key, says nothing alone."""
    if isinstance(reason, (RuntimeError, OSError)) and str(reason):
        return str(reason)
    return f"{type(reason).__name__}: {reason}"
