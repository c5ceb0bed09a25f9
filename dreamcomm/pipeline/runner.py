"""Runs one rank's row of a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dreamcomm.pipeline.compute.stage import (
    Result,
    StageRun,
    detached,
    handed_over,
    needs_gradient,
)
from dreamcomm.pipeline.messages.channel import Channel
from dreamcomm.pipeline.messages.key import Key, Slot
from dreamcomm.pipeline.schedule.actions import Action, Kind
from dreamcomm.pipeline.schedule.schedule import Schedule

__all__ = ["Batch", "Runner", "Timed"]


class Timed(NamedTuple):
    """When an action began, had its inputs, and ended, in seconds of time.perf_counter()."""

    action: Action
    begin: float
    ready: float
    end: float


@dataclass
class Batch:
    """A step's inputs, cut into micro-batches.

    Attributes:
        args: of the first stage, for each micro-batch.
        kwargs: for each micro-batch.
        targets: what the loss function gets after the output, for each micro-batch; None: no loss.
        trains: whether backward passes follow.
        weight: what each loss's gradient is multiplied by.
        number: of the step, for random states.
        keeps_outputs: the last stage's outputs are wanted.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] | None
    trains: bool
    weight: float
    number: int
    keeps_outputs: bool


@dataclass
class Outcome:
    """What a step left on this rank; ``results`` are the last stage's, by micro-batch."""

    results: dict[int, Result] = field(default_factory=dict)
    timeline: list[Timed] = field(default_factory=list)


def _labelled(action: Action) -> AbstractContextManager[Any]:
    """Shows the action in a profile that is being taken."""
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"pipeline {action}")


class Runner:
    """Runs actions on this rank's stages.

    Args:
        schedule: checked.
        rank: the row of the schedule.
        stages: of this rank, by number.
        takes: whether a stage takes a keyword argument of the user.
        channel: to the other ranks.
        peers: the channel's rank for each row of the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: dict[int, StageRun],
        takes: Callable[[int, str], bool],
        channel: Channel,
        peers: Sequence[int],
    ) -> None:
        self.schedule, self.stages = schedule, stages
        self.at: Action | None = None
        self.given: Any = None  # what the stage before gave, while a stage runs on it
        self._row = schedule.computes(rank)
        self._forwards = tuple(one for one in self._row if one.kind is Kind.F)
        self._takes, self._channel = takes, channel
        self._peer_of = [peers[one] for one in schedule.rank_of]
        self._local: dict[Key, Any] = {}
        self._last = schedule.stages - 1

    def run(self, step: int, batch: Batch) -> Outcome:
        """Runs a step's actions.

        Raises:
            PeerFailed, RankLost: see :class:`Channel`.
            Exception: what the stages and the loss function raise.
        """
        outcome = Outcome()
        self._local.clear()
        for stage in self.stages.values():
            stage.live_peak = 0
        for action in self._row if batch.trains else self._forwards:
            self._channel.poll()
            self.at = action
            begin = time.perf_counter()
            with _labelled(action):
                ready = self._act(step, action, batch, outcome)
            outcome.timeline.append(Timed(action, begin, ready, time.perf_counter()))
            self.at = None
        return outcome

    def _act(self, step: int, action: Action, batch: Batch, outcome: Outcome) -> float:
        """Runs an action; returns when its inputs were here."""
        stage, m = action.stage, action.microbatch
        assert m is not None
        if action.kind is Kind.F:
            return self._forward(step, stage, m, batch, outcome)
        if action.kind is Kind.W:
            ready = time.perf_counter()
            self.stages[stage].backward_weight(m)
            return ready
        gradients = self._gradients(step, stage, m, batch, outcome)
        ready = time.perf_counter()
        run = self.stages[stage]
        found = (run.backward if action.kind is Kind.B else run.backward_input)(m, gradients)
        if stage > 0:
            value = found[0] if len(found) == 1 else tuple(found)
            self._send(Key(step, Slot.BACKWARD, stage - 1, m), value)
        return ready

    def _forward(self, step: int, stage: int, m: int, batch: Batch, outcome: Outcome) -> float:
        inputs = batch.args[m] if stage == 0 else self._receive(step, Slot.FORWARD, stage, m)
        self.given = inputs if stage > 0 else None
        ready = time.perf_counter()
        kwargs = {k: v for k, v in batch.kwargs[m].items() if self._takes(stage, k)}
        is_last = stage == self._last
        targets = batch.targets[m] if is_last and batch.targets is not None else None
        result = self.stages[stage].forward(
            batch.number, m, inputs, kwargs, targets, trains=batch.trains
        )
        self.given = None
        if is_last:
            # The output would keep the graph until the end of the step.
            result.value = detached(result.value) if batch.keeps_outputs else None
            outcome.results[m] = result
        else:
            # Without a graph a stage may give the same memory again with the next micro-batch.
            reused = not batch.trains or not needs_gradient(result.value)
            self._send(Key(step, Slot.FORWARD, stage + 1, m), result.value, may_change=reused)
        return ready

    def _gradients(
        self, step: int, stage: int, m: int, batch: Batch, outcome: Outcome
    ) -> list[Tensor | None]:
        """The gradients of what the stage made of a micro-batch."""
        if stage < self._last:
            value = self._receive(step, Slot.BACKWARD, stage, m)
            return list(value) if isinstance(value, tuple) else [value]
        loss = outcome.results[m].loss
        if loss is None or not loss.requires_grad:
            return []
        outcome.results[m].loss = loss.detach()  # frees the graph with its backward pass
        return [torch.full_like(loss, batch.weight)]

    # Values between stages.

    def _send(self, key: Key, value: Any, *, may_change: bool = False) -> None:
        if key.stage in self.stages:
            self._local[key] = handed_over(value, copies=may_change)
        else:
            self._channel.send(self._peer_of[key.stage], key, value, may_change=may_change)

    def _receive(self, step: int, slot: Slot, stage: int, m: int) -> Any:
        key = Key(step, slot, stage, m)
        source = stage - 1 if slot is Slot.FORWARD else stage + 1
        if source in self.stages:
            return self._local.pop(key)
        return self._channel.receive(self._peer_of[source], key)

    def forget(self) -> None:
        """Drops what a failed step has left."""
        self._local.clear()
        self.at = self.given = None
        for stage in self.stages.values():
            stage.forget()
