"""Times a training step: alone, without communication, over Gloo and over dreamcomm.

    python benchmarks/training_step.py                      # MLP and GPT, DDP and FSDP2, 2 ranks
    python benchmarks/training_step.py --model mlp --wrapper ddp --steps 20
    python benchmarks/training_step.py --beside 2           # on a machine that others use

All variants take turns, step by step, in one run of the same processes. Before anything is timed
the weights after a few steps are compared: equal on all ranks, and as with Gloo.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from dreamcomm.tools.bench.measurement import Beside, Json, Measurement, World, chosen
from dreamcomm.tools.bench.turns import slowest, take_turns, timed
from models import MODELS, make_task
from training_report import Timing, show_timing
from training_variants import (
    COLLECTIVES,
    GLOO,
    NO_COMMUNICATION,
    PLAIN,
    VARIANTS,
    WRAPPERS,
    Trainer,
    make_groups,
    make_trainer,
    spawn_training,
)
from verified import CHECKED_STEPS, check_close, check_equal

WARMUP_STEPS = 3


@dataclass(frozen=True)
class RankTimes:
    """One rank's measurements: seconds of every step by variant, and the verification."""

    steps: dict[str, list[float]]
    parameters: int
    largest_difference: float


def run_rank(model: str, wrapper: str, steps: int) -> RankTimes:
    torch.set_num_threads(1)
    groups, rank = make_groups(), dist.get_rank()
    trainers = {
        variant: make_trainer(make_task(model, rank), wrapper, variant, groups)
        for variant in VARIANTS[wrapper]
    }
    for _ in range(CHECKED_STEPS):
        for trainer in trainers.values():
            trainer.step()
    difference = verify(trainers, groups[GLOO])
    turns = {variant: partial(timed, trainer.step) for variant, trainer in trainers.items()}
    times = take_turns(turns, steps, WARMUP_STEPS, rotates=True)
    parameters = sum(weight.numel() for weight in trainers[GLOO].task.model.parameters())
    return RankTimes(times, parameters, difference)


def verify(trainers: dict[str, Trainer], group: dist.ProcessGroup) -> float:
    """The largest difference between the weights of Gloo and of the others that communicate.

    Raises RuntimeError if it is more than rounding, or if the ranks' weights are not equal.
    """
    silent = (PLAIN, NO_COMMUNICATION, COLLECTIVES)
    found = {name: one.weights() for name, one in trainers.items() if name not in silent}
    for variant, weights in found.items():
        check_equal(variant, weights, group)
    return max(check_close(weights, found[GLOO]) for weights in found.values())


def measure(model: str, wrapper: str, world: int, steps: int, beside: int) -> Timing:
    ranks = spawn_training(run_rank, world, (model, wrapper, steps), beside)
    seconds = slowest([rank.steps for rank in ranks])
    difference = max(rank.largest_difference for rank in ranks)
    return Timing.of(model, wrapper, world, beside, ranks[0].parameters, seconds, difference)


def main(
    model: Annotated[
        list[str] | None, typer.Option(help="mlp, gpt or small; all if not given.")
    ] = None,
    wrapper: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(WRAPPERS)}; all if not given.")
    ] = None,
    world: World = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 40,
    beside: Beside = 0,
    json: Json = None,
) -> None:
    """Times training steps; see the head of this file."""
    measurement = Measurement(json)
    timings = []
    for name in chosen(model, MODELS, "--model"):
        for wrapping in chosen(wrapper, WRAPPERS, "--wrapper"):
            if wrapping == "fsdp2" and name == "small":
                continue  # it has no parts to shard
            timings.append(measure(name, wrapping, world, steps, beside))
            show_timing(measurement, timings[-1])
    measurement.write(training_step=[asdict(timing) for timing in timings])


if __name__ == "__main__":
    typer.run(main)
