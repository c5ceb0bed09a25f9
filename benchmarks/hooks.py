"""Times a training step under communication hooks: torch's own and dreamcomm's.

    python benchmarks/hooks.py                       # MLP of 25 M parameters, DDP, 2 ranks
    python benchmarks/hooks.py --steps 10 --json hooks.json

All variants take turns, step by step, in one run of the same processes. Before anything is timed
the weights after a few steps are compared: equal on all ranks, and near plain DDP's. Then the
two passes under the hooks are timed alone, beside torch's operations. See hooks.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import dreamcomm
from bucket_passes import Pass, show_passes, time_passes
from dreamcomm.tools.bench.measurement import Json, Measurement, World
from dreamcomm.tools.bench.statistics import percentile
from dreamcomm.tools.bench.turns import slowest, take_turns, timed
from models import Task, make_task
from training_variants import Groups, Trainer, make_groups, no_all_reduce, spawn_training
from verified import CHECKED_STEPS, check_equal, check_near

WARMUP_STEPS = 3


# DDP takes torch's hook by its own name only with CUDA, whatever the backend can do.
# Without annotations: DDP compares them with classes, and here they are text.
def torch_bf16(state, bucket):  # type: ignore[no-untyped-def]
    return default_hooks.bf16_compress_hook(state, bucket)


@dataclass(frozen=True)
class Variant:
    """How one model's gradients are exchanged."""

    backend: str
    hook: Callable[..., Any] | None = None
    ours: bool = False  # a hook of dreamcomm's, which needs its State
    tolerance: float = 0.0  # largest relative difference of weights from plain DDP's


SILENT, PLAIN, OURS = "no communication", "plain DDP", "hooks.bf16"
COMPARED = ("torch bf16, gloo", "torch bf16, dreamcomm")
VARIANTS = {
    SILENT: Variant("dreamcomm", no_all_reduce, tolerance=float("inf")),
    PLAIN: Variant("dreamcomm"),
    "torch bf16, gloo": Variant("gloo", torch_bf16, tolerance=1e-3),
    "torch bf16, dreamcomm": Variant("dreamcomm", torch_bf16, tolerance=1e-3),
    OURS: Variant("dreamcomm", dreamcomm.hooks.bf16, True, 1e-3),
    "hooks.bf16_feedback": Variant("dreamcomm", dreamcomm.hooks.bf16_feedback, True, 1e-3),
    "hooks.int8_feedback": Variant("dreamcomm", dreamcomm.hooks.int8_feedback, True, 1e-2),
    "hooks.average": Variant("dreamcomm", dreamcomm.hooks.average, True),
}


def make_trainer(task: Task, variant: Variant, groups: Groups) -> Trainer:
    """A task under DDP with one variant's hook."""
    group = groups[variant.backend]
    model = DistributedDataParallel(task.model, process_group=group, gradient_as_bucket_view=True)
    if variant.hook is not None:
        state = dreamcomm.hooks.State(group) if variant.ours else group
        model.register_comm_hook(state, variant.hook)
    return Trainer(task, model)


@dataclass(frozen=True)
class RankTimes:
    """One rank's measurements: seconds of every step by variant, and the verification."""

    steps: dict[str, list[float]]
    parameters: int
    differences: dict[str, float]


def run_rank(steps: int) -> RankTimes:
    torch.set_num_threads(1)
    groups, rank = make_groups(), dist.get_rank()
    trainers = {
        name: make_trainer(make_task("mlp", rank), variant, groups)
        for name, variant in VARIANTS.items()
    }
    for _ in range(CHECKED_STEPS):
        for trainer in trainers.values():
            trainer.step()
    weights = {name: trainer.weights() for name, trainer in trainers.items()}
    for name in VARIANTS:
        if name != SILENT:
            check_equal(name, weights[name], groups["gloo"])
    differences = {
        name: check_near(name, weights[name], weights[PLAIN], variant.tolerance)
        for name, variant in VARIANTS.items()
    }
    turns = {name: partial(timed, trainer.step) for name, trainer in trainers.items()}
    times = take_turns(turns, steps, WARMUP_STEPS, rotates=True)
    return RankTimes(times, sum(weight.numel() for weight in weights[PLAIN]), differences)


@dataclass(frozen=True)
class Row:
    """One variant: milliseconds of a step, its slowest rank's; exposed: beyond no communication."""

    p50_ms: float
    p99_ms: float
    exposed_ms: float
    largest_weight_difference: float


@dataclass(frozen=True)
class Timing:
    """All variants of one run, and how many times faster dreamcomm's bf16 is than torch's."""

    world: int
    parameters: int
    steps: int
    speedups: dict[str, float]
    variants: dict[str, Row]


def measure(world: int, steps: int) -> Timing:
    ranks = spawn_training(run_rank, world, (steps,))
    rows: dict[str, Row] = {}
    for name, seconds in slowest([rank.steps for rank in ranks]).items():
        difference = max(rank.differences[name] for rank in ranks)
        p50, p99 = 1e3 * median(seconds), 1e3 * percentile(seconds, 99)
        least = rows[SILENT].p50_ms if rows else p50
        rows[name] = Row(p50, p99, p50 - least, difference)
    speedups = {name: rows[name].p50_ms / rows[OURS].p50_ms for name in COMPARED}
    return Timing(world, ranks[0].parameters, steps, speedups, rows)


def show_timing(measurement: Measurement, timing: Timing) -> None:
    measurement.table(
        f"MLP, {timing.parameters / 1e6:.1f} M parameters, under DDP, {timing.world} ranks, "
        f"{timing.steps} steps of each",
        ("", "p50", "p99", "exposed"),
        (
            (name, *(f"{value:.1f} ms" for value in (row.p50_ms, row.p99_ms, row.exposed_ms)))
            for name, row in timing.variants.items()
        ),
    )
    for name, speedup in timing.speedups.items():
        measurement.say(f"{name} / {OURS}: {speedup:.2f}")


def main(
    world: World = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 40,
    json: Json = None,
) -> None:
    """Times training steps under hooks; see the head of this file."""
    measurement = Measurement(json)
    timing = measure(world, steps)
    show_timing(measurement, timing)
    passes: list[Pass] = time_passes()
    show_passes(measurement, passes)
    measurement.write(hooks=asdict(timing), passes=[asdict(one) for one in passes])


if __name__ == "__main__":
    typer.run(main)
