"""Compares lengths of pipeline schedules with their predictions, by stages that sleep.

    python benchmarks/pipeline_schedules.py --json schedules.json      # 5 minutes
    python benchmarks/pipeline_schedules.py --ranks 2 --microbatches 4 --unit 5 --steps 3

A stage sleeps instead of computing, so many ranks fit on few cores. On each rank a micro-batch
takes one unit forward (F), one for the gradients of inputs (I) and one for those of weights (W). A
stage of the interleaved schedule takes half of a unit, because a rank has two of them. The first
stage has no gradients of inputs: its W takes two units, which changes no schedule's length.

The cases of a number of ranks take turns, step by step, in one run of the same processes. A step
lasts from the first rank's begin to the last rank's end, the agreement at its end included. Figures
are medians of the steps after a warm-up. The prediction is that of dreamcomm.pipeline.simulate for
the same units, with messages that take no time. Speedups are those of GPipe over one process that
runs all stages without a pipeline. That process's time over the sum of its sleeps shows by how much
the machine's sleeps are too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

import dreamcomm
from dreamcomm.pipeline import Pipeline, make_schedule, simulate
from dreamcomm.tools.bench.measurement import Json, Measurement, chosen
from dreamcomm.tools.bench.turns import spanned, take_turns

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zb-h1")
RANKS, MICROBATCHES = (2, 4, 8), (1, 4, 32)
LONGEST = 1.05  # goal: a measured length over the predicted one
SPEEDUPS = {2: 1.8, 4: 3.4, 8: 6.3}  # goals, at 32 micro-batches
SPEEDUP_MICROBATCHES = 32


class SleepInBackward(torch.autograd.Function):
    """Returns its tensor; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


def sleep_in_backward(tensor: Tensor, seconds: float) -> Tensor:
    apply = cast(Callable[[Tensor, float], Tensor], SleepInBackward.apply)
    return apply(tensor, seconds)


class SleepingStage(nn.Module):
    """Sleeps in the forward, in the input half of the backward and in its weight half.

    The halves are two nodes of the graph: one on the path to the input, one on the branch to the
    weight. A split backward runs them apart.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        weight = sleep_in_backward(self.weight, self.seconds)
        return sleep_in_backward(x * weight, self.seconds)


def loss_fn(output: Tensor) -> Tensor:
    return output.mean()


Case = tuple[str, int]  # a schedule and its micro-batches


@dataclass(frozen=True)
class Step:
    """One rank's step, in seconds of a clock that all processes share."""

    begin: float
    end: float
    busy: float


@dataclass(frozen=True)
class Length:
    """A schedule's row of the report. Bubbles are shares of all ranks' time without work.

    Attributes:
        bubble_formula: of the schedule's paper; None where it does not hold for these sizes.
        live_peaks: by stage, micro-batches whose activations were kept at once.
        live_bounds: what the schedule allows.
    """

    schedule: str
    ranks: int
    microbatches: int
    unit_ms: float
    predicted_ms: float
    p50_ms: float
    slowest_ms: float
    measured_over_predicted: float
    bubble_formula: float | None
    bubble_predicted: float
    bubble_measured: float
    live_peaks: list[int]
    live_bounds: list[int]

    @property
    def is_within_goal(self) -> bool:
        return self.measured_over_predicted <= LONGEST and self.live_peaks == self.live_bounds


@dataclass(frozen=True)
class Speedup:
    """GPipe over one process that runs all stages."""

    ranks: int
    microbatches: int
    alone_ms: float
    alone_over_predicted: float
    pipeline_ms: float
    speedup: float
    goal: float | None


def stages_a_rank(schedule: str) -> int:
    return 2 if schedule == "interleaved1f1b" else 1


def run_rank(cases: list[Case], unit: float, steps: int) -> list[tuple[list[Step], dict[int, int]]]:
    """Of each case this rank's timed steps, and its stages' live peaks. Cases take turns."""
    torch.set_num_threads(1)
    pipes = {case: make_pipeline(case, unit) for case in cases}
    found = take_turns(
        {c: partial(timed_step, pipe) for c, pipe in pipes.items()}, steps, warm_up=1
    )
    return [(found[case], pipe.report().live_peak) for case, pipe in pipes.items()]


def timed_step(pipe: Pipeline) -> Step:
    batch = torch.ones(pipe.n_microbatches, 16)
    begin, end = spanned(lambda: pipe.step(batch, return_outputs=False))
    return Step(begin, end, pipe.report().busy)


def make_pipeline(case: Case, unit: float) -> Pipeline:
    schedule, microbatches = case
    on_rank = stages_a_rank(schedule)
    stages = [SleepingStage(unit / on_rank) for _ in range(on_rank * dist.get_world_size())]
    return Pipeline(stages, microbatches, schedule=schedule, loss_fn=loss_fn)


def measure(ranks: int, cases: list[Case], unit: float, steps: int) -> list[Length]:
    everyone = dreamcomm.spawn(run_rank, ranks, args=(cases, unit, steps))
    return [
        length_of(case, ranks, unit, list(found))
        for case, found in zip(cases, zip(*everyone, strict=True), strict=True)
    ]


def length_of(
    case: Case, ranks: int, unit: float, everyone: list[tuple[list[Step], dict[int, int]]]
) -> Length:
    schedule, microbatches = case
    together = list(zip(*(found for found, _ in everyone), strict=True))
    lengths = [max(s.end for s in step) - min(s.begin for s in step) for step in together]
    busy = [sum(s.busy for s in step) for step in together]
    bubbles = [1 - b / (ranks * length) for b, length in zip(busy, lengths, strict=True)]
    live = {stage: peak for _, peaks in everyone for stage, peak in peaks.items()}
    on_rank = stages_a_rank(schedule)
    predicted = simulate(make_schedule(schedule, ranks, on_rank * ranks, microbatches))
    predicted_ms = 1e3 * float(predicted.length) * unit / on_rank
    return Length(
        schedule,
        ranks,
        microbatches,
        1e3 * unit,
        predicted_ms,
        1e3 * median(lengths),
        1e3 * max(lengths),
        1e3 * median(lengths) / predicted_ms,
        bubble_formula(schedule, ranks, microbatches),
        predicted.bubble,
        median(bubbles),
        [live[stage] for stage in sorted(live)],
        live_bounds(schedule, ranks, microbatches),
    )


def bubble_formula(schedule: str, ranks: int, microbatches: int) -> float | None:
    idle = ranks - 1
    if schedule == "interleaved1f1b":
        chunks = stages_a_rank(schedule) * microbatches
        return idle / (chunks + idle) if microbatches % ranks == 0 else None
    if schedule == "zb-h1":
        length = max(3 * microbatches + idle, 2 * microbatches + 2 * ranks - 1)
        return 1 - 3 * microbatches / length
    return idle / (microbatches + idle)


def live_bounds(schedule: str, ranks: int, microbatches: int) -> list[int]:
    """How many micro-batches' activations each stage may keep: M, or min(M, K - s)."""
    if schedule == "gpipe":
        return [microbatches] * ranks
    if schedule == "interleaved1f1b":
        stages = stages_a_rank(schedule) * ranks
        return list(simulate(make_schedule(schedule, ranks, stages, microbatches)).live_peak)
    return [min(microbatches, ranks - stage) for stage in range(ranks)]


def seconds_alone(ranks: int, microbatches: int, unit: float) -> float:
    """One process that runs the stages of all ranks."""
    model = nn.Sequential(*(SleepingStage(unit) for _ in range(ranks)))
    batch = torch.ones(microbatches, 16, requires_grad=True)
    begin = time.perf_counter()
    for one in torch.split(batch, 1):
        (loss_fn(model(one)) / microbatches).backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - begin


def measure_speedup(gpipe: Length) -> Speedup:
    world, count = gpipe.ranks, gpipe.microbatches
    alone = 1e3 * seconds_alone(world, count, gpipe.unit_ms / 1e3)
    return Speedup(
        world,
        count,
        alone,
        alone / (3 * world * count * gpipe.unit_ms),
        gpipe.p50_ms,
        alone / gpipe.p50_ms,
        SPEEDUPS.get(world) if count == SPEEDUP_MICROBATCHES else None,
    )


HEADINGS = ["schedule", "ranks", "micro-batches", "predicted ms", "p50 ms", "ratio"]
HEADINGS += ["bubble: formula", "predicted", "measured", "kept at once", "goal"]


def cells(one: Length) -> list[object]:
    return [
        one.schedule,
        one.ranks,
        one.microbatches,
        f"{one.predicted_ms:.1f}",
        f"{one.p50_ms:.1f}",
        f"{one.measured_over_predicted:.3f}",
        "" if one.bubble_formula is None else f"{one.bubble_formula:.1%}",
        f"{one.bubble_predicted:.1%}",
        f"{one.bubble_measured:.1%}",
        " ".join(map(str, one.live_peaks)),
        "met" if one.is_within_goal else "missed",
    ]


def words(one: Speedup) -> str:
    goal = "" if one.goal is None else f", goal {one.goal}"
    return (
        f"GPipe, {one.ranks} ranks, {one.microbatches} micro-batches: {one.speedup:.2f} times "
        f"as fast as one process ({one.alone_ms:.0f} ms, {one.alone_over_predicted:.3f} times "
        f"its sleeps){goal}"
    )


def main(
    schedule: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SCHEDULES)}; all if not given.")
    ] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=1, help="2, 4 and 8 if not given.")] = None,
    microbatches: Annotated[
        list[int] | None, typer.Option(min=1, help="1, 4 and 32 if not given.")
    ] = None,
    unit: Annotated[float, typer.Option(min=0.1, help="Milliseconds of F, of I, of W.")] = 20.0,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 5,
    json: Json = None,
) -> None:
    """Times schedules of sleeping stages; see the head of this file."""
    counts = microbatches or MICROBATCHES
    names = chosen(schedule, SCHEDULES, "--schedule")
    cases = [(name, count) for count in counts for name in names]
    lengths, speedups = [], []
    for world in ranks or RANKS:
        found = measure(world, cases, unit / 1e3, steps)
        lengths += found
        longest = ("gpipe", max(counts))
        speedups += [
            measure_speedup(one) for one in found if (one.schedule, one.microbatches) == longest
        ]
    measurement = Measurement(json)
    title = f"Steps of sleeping stages, medians of {steps}"
    measurement.table(title, HEADINGS, map(cells, lengths))
    for one in speedups:
        measurement.say(words(one))
    measurement.write(
        steps=steps,
        lengths=[asdict(one) for one in lengths],
        speedups=[asdict(one) for one in speedups],
    )


if __name__ == "__main__":
    typer.run(main)
