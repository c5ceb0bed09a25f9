"""Runs plans as collectives/ does, and keeps count of what was run and where it stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch.distributed as dist

from collectives.executor import Executor, Started
from collectives.plan import Plan, Step
from endurance.draw import Groups
from endurance.orders import FROM_INSIDE, Order, Struck, Told


class OwnFault(Exception):
    """The exception that a rank raises as its fault."""


class Walker(Executor):
    """One rank's way through an episode."""

    def __init__(self, order: Order, connection: Connection, told: Told) -> None:
        self.me = order.rank
        self.fault = order.episode.fault
        self.connection = connection
        self.told = told
        self.turn = -1

    @contextmanager
    def in_groups(self, groups: Groups) -> Iterator[None]:
        """Makes the groups, and destroys those of parts of the ranks after plans that succeeded:
        after a failure all end with the default group."""
        super().__init__(Plan(len(groups[0]), groups, ()))
        yield
        for ranks, group in zip(groups[1:], self.groups[1:], strict=True):
            if self.me in ranks:
                dist.destroy_process_group(group)

    def run_plan(self, plan: Plan, turn: int = -1) -> None:
        """``turn``: the number of an exposed plan."""
        self.plan, self.turn = plan, turn
        for index, step in enumerate(plan.steps):
            self.run(index, step)
        self.drain()

    def run(self, index: int, step: Step) -> None:
        fault = self.fault
        if (
            fault.kind in FROM_INSIDE
            and self.me in fault.victims
            and (self.turn, index) == (fault.turn, fault.step)
        ):
            self.strike()
        if step.drain:  # here and not there, as each wait notes its own step
            self.drain()
        self.note(step)
        super().run(index, step)

    def strike(self) -> None:
        self.connection.send(Struck(time.monotonic()))
        if self.fault.kind == "os._exit":
            os._exit(3)
        raise OwnFault

    def finish(self, index: int, step: Step, started: Started) -> None:
        self.note(step)
        super().finish(index, step, started)
        if started.works or started.results or step.kind == "objects":
            self.told.calls[step.kind] += 1
        self.told.nbytes += sum(expected.nbytes for _, expected in started.results)

    def note(self, step: Step) -> None:
        """Where this rank is, should it not come back."""
        self.told.step = str(step)
        self.told.members = self.plan.groups[step.group]
        self.told.begun = time.monotonic()
