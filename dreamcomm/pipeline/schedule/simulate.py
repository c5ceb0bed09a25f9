"""How long a schedule takes, where its bubble is and how many activations it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from dreamcomm.pipeline.schedule.actions import COMPUTES, Action, Kind
from dreamcomm.pipeline.schedule.clock import Clock, Costs, Deadlock, Number, Span
from dreamcomm.pipeline.schedule.schedule import Schedule

__all__ = ["Cost", "Deadlock", "Number", "Simulation", "Span", "simulate"]

Cost: TypeAlias = Number | Sequence[Number] | Callable[[Action], Number]


@dataclass(frozen=True)
class Simulation:
    """A schedule's run. Times are exact if all costs are int or Fraction.

    Attributes:
        schedule: what was run.
        length: the time at which the last rank ends.
        spans: the steps of each rank with their times, OVERLAP_F_B as its parts.
        busy: the time that each rank computes.
        live_peak: for each stage, the most micro-batches whose forward has begun and whose
            backward for inputs is not done. 0 for all stages if there is no backward.
    """

    schedule: Schedule
    length: Number
    spans: tuple[tuple[Span, ...], ...]
    busy: tuple[Number, ...]
    live_peak: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute."""
        if not self.length:
            return 0.0
        busy = sum((Fraction(time) for time in self.busy), Fraction(0))
        return float(1 - busy / (Fraction(self.length) * len(self.busy)))


def simulate(
    schedule: Schedule,
    *,
    forward: Cost = 1,
    backward_input: Cost = 1,
    backward_weight: Cost = 1,
    message: Cost = 0,
) -> Simulation:
    """Runs a schedule on a clock that begins at 0.

    Args:
        schedule: with or without messages. Without, a result reaches the next stage's rank when
            the time of a message has passed.
        forward, backward_input, backward_weight: time of F, of I and of W; B takes the sum of the
            last two. A number, one number for each stage, or a function of the action.
        message: time from a send to its arrival, in the same forms; by the send and its stage.

    Returns:
        The time of every step, and what follows from it.

    Raises:
        Deadlock: a rank waits for ever, because a step it needs does not run or another message
            than the one it expects is next.
        ValueError: a cost is negative, or there is not one for each stage.
    """
    given = {
        "forward": forward,
        "backward_input": backward_input,
        "backward_weight": backward_weight,
        "message": message,
    }
    costs = Costs(**{name: _cost(name, cost, schedule.stages) for name, cost in given.items()})
    return _run(schedule, costs)


def _run(schedule: Schedule, costs: Costs) -> Simulation:
    clock = Clock(schedule, costs)
    clock.run()
    return Simulation(
        schedule,
        max(clock.free, default=0),
        tuple(tuple(row) for row in clock.spans),
        tuple(_busy(row) for row in clock.spans),
        _live_peak(schedule, clock.spans),
    )


def _cost(name: str, cost: Cost, stages: int) -> Callable[[Action], Number]:
    if callable(cost):
        return cost
    costs = list(cost) if isinstance(cost, Sequence) else [cost] * stages
    if len(costs) != stages:
        raise ValueError(f"simulate: {name} has {len(costs)} costs for {stages} stages")
    if any(each < 0 for each in costs):
        raise ValueError(f"simulate: {name} has a negative cost")
    return lambda action: costs[action.stage]


def _busy(row: Sequence[Span]) -> Number:
    total: Number = 0
    for span in row:
        if span.action.kind in COMPUTES:
            total = total + (span.end - span.start)
    return total


def _live_peak(schedule: Schedule, rows: Sequence[Sequence[Span]]) -> tuple[int, ...]:
    live = [0] * schedule.stages
    peak = [0] * schedule.stages
    for row in rows:
        for action, _, _ in row:
            if action.kind is Kind.F:
                live[action.stage] += 1
                peak[action.stage] = max(peak[action.stage], live[action.stage])
            elif action.kind in (Kind.B, Kind.I):
                live[action.stage] -= 1
    return tuple(0 for _ in peak) if schedule.forward_only else tuple(peak)
