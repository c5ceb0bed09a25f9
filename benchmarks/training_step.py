"""Times a training step: alone, without communication, over Gloo and over dreamcomm.

    python benchmarks/training_step.py                      # MLP and GPT, DDP and FSDP2, 2 ranks
    python benchmarks/training_step.py --model mlp --wrapper ddp --steps 20
    python benchmarks/training_step.py --beside 2           # on a machine that others use

All variants take turns, step by step, in one run of the same processes. Before anything is timed
the weights after a few steps are compared: equal on all ranks, and as with Gloo.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

import dreamcomm
from dreamcomm.tools.bench.busy import busy_processes
from machine import check_output, describe_machine, write_json
from models import MODELS, make_task
from training_report import Timing, print_timing
from training_variants import (
    COLLECTIVES,
    DREAMCOMM,
    GLOO,
    NO_COMMUNICATION,
    PLAIN,
    VARIANTS,
    WRAPPERS,
    Trainer,
    digest,
)

CHECKED_STEPS = 3
WARMUP_STEPS = 3


@dataclass(frozen=True)
class RankTimes:
    """One rank's measurements: seconds of every step by variant, and the verification."""

    steps: dict[str, list[float]]
    parameters: int
    largest_difference: float


def run_rank(model: str, wrapper: str, steps: int) -> RankTimes:
    torch.set_num_threads(1)
    world = dist.group.WORLD
    assert world is not None
    groups = {DREAMCOMM: world, NO_COMMUNICATION: world, GLOO: dist.new_group(backend="gloo")}
    rank = dist.get_rank()
    trainers = {
        variant: Trainer(make_task(model, rank), wrapper, variant, groups)
        for variant in VARIANTS[wrapper]
    }
    for _ in range(CHECKED_STEPS):
        for trainer in trainers.values():
            trainer.step()
    difference = verify(trainers, groups[GLOO])
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS[wrapper]}
    for number in range(WARMUP_STEPS + steps):
        for variant, trainer in trainers.items():
            seconds = trainer.timed_step()
            if number >= WARMUP_STEPS:
                times[variant].append(seconds)
    parameters = sum(weight.numel() for weight in trainers[GLOO].task.model.parameters())
    return RankTimes(times, parameters, difference)


def verify(trainers: dict[str, Trainer], group: dist.ProcessGroup) -> float:
    """The largest difference between the weights of Gloo and of the others that communicate.

    Raises RuntimeError if it is more than rounding, or if the ranks' weights are not equal.
    """
    compared = [
        variant for variant in trainers if variant not in (PLAIN, NO_COMMUNICATION, COLLECTIVES)
    ]
    found = {variant: trainers[variant].weights() for variant in compared}
    for variant, weights in found.items():
        digests: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest(weights), group=group)
        if len(set(digests)) != 1:
            raise RuntimeError(f"the ranks' weights differ after training over {variant}")
    pairs = [pair for variant in compared for pair in zip(found[GLOO], found[variant], strict=True)]
    difference = max((one - other).abs().max().item() for one, other in pairs)
    if not all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in pairs):
        raise RuntimeError(
            f"after {CHECKED_STEPS} steps the weights differ from Gloo's by up to {difference:.3g}"
        )
    return difference


def measure(model: str, wrapper: str, world: int, steps: int, beside: int) -> Timing:
    with busy_processes(beside):
        ranks = dreamcomm.spawn(run_rank, world, args=(model, wrapper, steps))
    # A step is over when the last rank has ended it.
    slowest = {
        variant: [
            max(moment) for moment in zip(*(rank.steps[variant] for rank in ranks), strict=True)
        ]
        for variant in VARIANTS[wrapper]
    }
    difference = max(rank.largest_difference for rank in ranks)
    return Timing.of(model, wrapper, world, beside, ranks[0].parameters, slowest, difference)


def chosen(given: list[str] | None, known: list[str], option: str) -> list[str]:
    for name in given or []:
        if name not in known:
            raise typer.BadParameter(f"expected one of {', '.join(known)}", param_hint=option)
    return given or known


def main(
    model: Annotated[
        list[str] | None, typer.Option(help="mlp, gpt or small; all if not given.")
    ] = None,
    wrapper: Annotated[
        list[str] | None, typer.Option(help="ddp, fsdp2 or zero; all if not given.")
    ] = None,
    world: Annotated[int, typer.Option(min=2, max=16, help="Ranks.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 40,
    beside: Annotated[int, typer.Option(min=0, help="Busy processes beside the ranks.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
) -> None:
    """Times training steps; see the head of this file."""
    check_output(json)
    # Read when DistributedDataParallel is made, in the ranks: buckets from the backend's memory.
    os.environ["DDP_DISABLE_COMM_MEM"] = "0"
    console = Console()
    timings = []
    for name in chosen(model, [*MODELS], "--model"):
        for wrapping in chosen(wrapper, [*WRAPPERS], "--wrapper"):
            if wrapping == "fsdp2" and name == "small":
                continue  # it has no parts to shard
            timings.append(measure(name, wrapping, world, steps, beside))
            print_timing(console, timings[-1])
    if json is not None:
        found = [asdict(timing) for timing in timings]
        write_json(json, {"machine": describe_machine(), "training_step": found})


if __name__ == "__main__":
    typer.run(main)
