"""Times a training loop that reads its data through torch's DataLoader, over Gloo and dreamcomm.

    python benchmarks/training_loader.py                    # MLP, 2 ranks, 2 workers a rank
    python benchmarks/training_loader.py --workers 4 --sample-ms 5 --beside 2

The workers of the loader compute beside the ranks, as those do that decode pictures. The variants
take turns of some steps each, in one run of the same processes. See training.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dreamcomm.tools.bench import busy
from dreamcomm.tools.bench.measurement import Beside, Json, Measurement, World
from dreamcomm.tools.bench.turns import take_turns, together
from models import MLP_ROWS, MLP_WIDTHS, make_task
from training_step import verify
from training_variants import (
    DREAMCOMM,
    GLOO,
    NO_COMMUNICATION,
    Trainer,
    make_groups,
    make_trainer,
    spawn_training,
)
from verified import CHECKED_STEPS

VARIANTS = (NO_COMMUNICATION, GLOO, DREAMCOMM)
PREFETCHED = 2  # batches of each worker, torch's default

Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """``turns`` of each variant of ``steps`` steps; ``sample_ms``: a worker's work for a sample."""

    world: int
    beside: int
    workers: int
    sample_ms: float
    turns: int
    steps: int

    @property
    def untimed(self) -> int:
        """Steps at the start of a turn on batches that the variant before left time for."""
        return max(1, PREFETCHED * self.workers)

    @property
    def batches(self) -> int:
        """The results of one rank."""
        return CHECKED_STEPS + len(VARIANTS) * self.turns * (self.untimed + self.steps)


class Samples(Dataset[Sample]):
    """Random rows for the MLP that cost ``milliseconds`` of processor time each."""

    def __init__(self, length: int, milliseconds: float) -> None:
        self.length, self.milliseconds = length, milliseconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        end = time.thread_time() + 1e-3 * self.milliseconds
        rows = torch.Generator().manual_seed(index)
        inputs, targets = (torch.randn(MLP_WIDTHS[side], generator=rows) for side in (0, -1))
        while time.thread_time() < end:
            pass
        return inputs, targets


def batches_of(plan: Plan) -> Iterator[Sample]:
    """This rank's batches, read ahead by its workers."""
    samples = Samples(plan.batches * MLP_ROWS * plan.world, plan.sample_ms)
    sampler: DistributedSampler[Sample] = DistributedSampler(samples)
    return iter(DataLoader(samples, MLP_ROWS, sampler=sampler, num_workers=plan.workers))


@dataclass(frozen=True)
class Turn:
    """Seconds of a step on this rank, the average of a turn; those it waited for a batch."""

    step: float
    waiting: float


def run_rank(plan: Plan) -> tuple[dict[str, list[Turn]], float]:
    """Every variant's turns, and the largest difference of the weights from Gloo's."""
    torch.set_num_threads(1)
    groups, rank = make_groups(), dist.get_rank()
    trainers = {
        variant: make_trainer(make_task("mlp", rank), "ddp", variant, groups)
        for variant in VARIANTS
    }
    batches = batches_of(plan)
    for _ in range(CHECKED_STEPS):
        inputs, targets = next(batches)
        for trainer in trainers.values():
            trainer.train_on(inputs, targets)
    difference = verify(trainers, groups[GLOO])
    turns = {name: partial(take_turn, one, batches, plan) for name, one in trainers.items()}
    return take_turns(turns, plan.turns), difference


def take_turn(trainer: Trainer, batches: Iterator[Sample], plan: Plan) -> Turn:
    """Trains as a program does, without a barrier between steps."""
    for _ in range(plan.untimed):
        trainer.train_on(*next(batches))
    dist.barrier()
    waiting = 0.0
    begin = time.perf_counter()
    for _ in range(plan.steps):
        asked = time.perf_counter()
        batch = next(batches)
        waiting += time.perf_counter() - asked
        trainer.train_on(*batch)
    return Turn((time.perf_counter() - begin) / plan.steps, waiting / plan.steps)


@dataclass(frozen=True)
class Row:
    """One variant: milliseconds of a step, the median turn's and the slowest turn's."""

    p50_ms: float
    worst_ms: float
    waiting_ms: float  # for a batch, in the median turn


@dataclass(frozen=True)
class Timing:
    """All variants of one run."""

    plan: Plan
    largest_weight_difference: float
    gloo_over_dreamcomm: float
    variants: dict[str, Row]


def measure(plan: Plan) -> Timing:
    ranks = spawn_training(run_rank, plan.world, (plan,), plan.beside)
    rows = {}
    for variant, moments in together([turns for turns, _ in ranks]).items():
        # A turn is over when the last rank has ended it.
        steps = [1e3 * max(turn.step for turn in moment) for moment in moments]
        waiting = [1e3 * max(turn.waiting for turn in moment) for moment in moments]
        rows[variant] = Row(median(steps), max(steps), median(waiting))
    difference = max(difference for _, difference in ranks)
    return Timing(plan, difference, rows[GLOO].p50_ms / rows[DREAMCOMM].p50_ms, rows)


def show_timing(measurement: Measurement, timing: Timing) -> None:
    plan = timing.plan
    title = [
        f"MLP under ddp, {plan.world} ranks with {plan.workers} loader workers each, "
        f"{plan.sample_ms:g} ms of work per sample",
        busy.words(plan.beside),
        f"{plan.turns} turns of {plan.steps} steps of each",
    ]
    measurement.table(
        ", ".join(filter(None, title)),
        ("", "step, p50", "slowest turn", "waits for data"),
        (
            (name, *(f"{value:.1f} ms" for value in (row.p50_ms, row.worst_ms, row.waiting_ms)))
            for name, row in timing.variants.items()
        ),
    )
    measurement.say(
        f"gloo / dreamcomm: {timing.gloo_over_dreamcomm:.2f}. After the first steps all ranks' "
        f"weights are equal, and as with gloo to {timing.largest_weight_difference:.1g}."
    )


def main(
    world: World = 2,
    workers: Annotated[int, typer.Option(min=0, help="Loader processes of each rank.")] = 2,
    sample_ms: Annotated[
        float, typer.Option(min=0, help="Processor time that a worker spends on a sample.")
    ] = 2.0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each variant.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a turn.")] = 10,
    beside: Beside = 0,
    json: Json = None,
) -> None:
    """Times a training loop with a DataLoader; see the head of this file."""
    timing = measure(Plan(world, beside, workers, sample_ms, turns, steps))
    measurement = Measurement(json)
    show_timing(measurement, timing)
    measurement.write(training_loader=asdict(timing))


if __name__ == "__main__":
    typer.run(main)
