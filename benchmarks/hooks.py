"""Times a training step under communication hooks: torch's own and dreamcomm's.

    python benchmarks/hooks.py                       # MLP of 25 M parameters, DDP, 2 ranks
    python benchmarks/hooks.py --steps 10 --json hooks.json

All variants take turns, step by step, in one run of the same processes. Before anything is timed
the weights after a few steps are compared: equal on all ranks, and near plain DDP's. Then the
two passes under the hooks are timed alone, beside torch's operations. See hooks.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import dreamcomm
from bucket_passes import Pass, print_passes, time_passes
from machine import check_output, describe_machine, write_json
from models import Task, make_task
from training_report import percentile
from training_variants import LEARNING_RATE, Trainer, digest, no_all_reduce

CHECKED_STEPS = 3
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


class HookTrainer(Trainer):
    """A task under DDP with one variant's hook."""

    def __init__(self, task: Task, variant: Variant, groups: dict[str, dist.ProcessGroup]) -> None:
        group = groups[variant.backend]
        self.task = task
        self.model = DistributedDataParallel(
            task.model, process_group=group, gradient_as_bucket_view=True
        )
        if variant.hook is not None:
            state = dreamcomm.hooks.State(group) if variant.ours else group
            self.model.register_comm_hook(state, variant.hook)
        self.optimizer = torch.optim.SGD(task.model.parameters(), lr=LEARNING_RATE)


@dataclass(frozen=True)
class RankTimes:
    """One rank's measurements: seconds of every step by variant, and the verification."""

    steps: dict[str, list[float]]
    parameters: int
    differences: dict[str, float]


def run_rank(steps: int) -> RankTimes:
    torch.set_num_threads(1)
    world = dist.group.WORLD
    assert world is not None
    groups = {"dreamcomm": world, "gloo": dist.new_group(backend="gloo")}
    trainers = {
        name: HookTrainer(make_task("mlp", dist.get_rank()), variant, groups)
        for name, variant in VARIANTS.items()
    }
    for _ in range(CHECKED_STEPS):
        for trainer in trainers.values():
            trainer.step()
    differences = {name: verify(name, trainers, groups["gloo"]) for name in VARIANTS}
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    names = [*VARIANTS]
    for number in range(WARMUP_STEPS + steps):
        first = number % len(names)  # the order rotates: no variant always follows the same one
        for name in names[first:] + names[:first]:
            seconds = trainers[name].timed_step()
            if number >= WARMUP_STEPS:
                times[name].append(seconds)
    parameters = sum(weight.numel() for weight in trainers[PLAIN].task.model.parameters())
    return RankTimes(times, parameters, differences)


def verify(name: str, trainers: dict[str, HookTrainer], group: dist.ProcessGroup) -> float:
    """The largest difference of a weight from plain DDP's, over the largest weight.

    Raises RuntimeError if it is more than the variant may have, or the ranks' weights differ.
    """
    weights, plain = trainers[name].weights(), trainers[PLAIN].weights()
    difference = max(
        ((one - other).abs().max() / other.abs().max()).item()
        for one, other in zip(weights, plain, strict=True)
    )
    digests: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest(weights), group=group)
    if len(set(digests)) != 1 and name != SILENT:
        raise RuntimeError(f"the ranks' weights differ after training with {name}")
    if difference > VARIANTS[name].tolerance:
        raise RuntimeError(f"{name}: weights differ from plain DDP's by {difference:.2g}")
    return difference


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
    ranks = dreamcomm.spawn(run_rank, world, args=(steps,))
    rows: dict[str, Row] = {}
    for name in VARIANTS:
        # A step is over when the last rank has ended it.
        slowest = [max(moment) for moment in zip(*(r.steps[name] for r in ranks), strict=True)]
        difference = max(rank.differences[name] for rank in ranks)
        p50, p99 = 1e3 * median(slowest), 1e3 * percentile(slowest, 0.99)
        least = rows[SILENT].p50_ms if rows else p50
        rows[name] = Row(p50, p99, p50 - least, difference)
    speedups = {name: rows[name].p50_ms / rows[OURS].p50_ms for name in COMPARED}
    return Timing(world, ranks[0].parameters, steps, speedups, rows)


def print_timing(console: Console, timing: Timing) -> None:
    title = (
        f"MLP, {timing.parameters / 1e6:.1f} M parameters, under DDP, {timing.world} ranks, "
        f"{timing.steps} steps of each"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("p50", "p99", "exposed"):
        table.add_column(heading, justify="right")
    for name, row in timing.variants.items():
        shown = (f"{value:.1f} ms" for value in (row.p50_ms, row.p99_ms, row.exposed_ms))
        table.add_row(name, *shown)
    console.print(table)
    for name, speedup in timing.speedups.items():
        console.print(f"{name} / {OURS}: {speedup:.2f}", highlight=False)
    console.print()


def main(
    world: Annotated[int, typer.Option(min=2, max=16, help="Ranks.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 40,
    json: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
) -> None:
    """Times training steps under hooks; see the head of this file."""
    check_output(json)
    # Read when DistributedDataParallel is made, in the ranks: buckets from the backend's memory.
    os.environ["DDP_DISABLE_COMM_MEM"] = "0"
    console = Console()
    timing = measure(world, steps)
    print_timing(console, timing)
    passes: list[Pass] = time_passes()
    print_passes(console, passes)
    if json is not None:
        content = {"hooks": asdict(timing), "passes": [asdict(one) for one in passes]}
        write_json(json, {"machine": describe_machine(), **content})


if __name__ == "__main__":
    typer.run(main)
