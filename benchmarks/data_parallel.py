"""Times DataParallel's replicas in threads beside one thread and torch's threads within operators.

    python benchmarks/data_parallel.py --json data_parallel.json    # 5 minutes on two cores
    python benchmarks/data_parallel.py --rounds 10 --beside 0

A step is a forward pass, the loss, a backward pass and SGD, in one process. All ways of a model
take turns in one run. torch.nn.DataParallel without GPUs is the line of torch's threads. Everything
is measured twice: with no other program, and beside a busy process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Annotated

import torch
import typer
from torch import nn

import dreamcomm
from dreamcomm.tools.bench.busy import busy_processes
from dreamcomm.tools.bench.measurement import BesideEach, Json, Measurement
from dreamcomm.tools.bench.turns import take_turns
from models import GPT_ROWS, MLP_ROWS, make_task

# A model, how many times its rows for one rank, and what is wanted of DataParallel there: its speed
# over one thread's, and over that of torch's threads.
CASES: dict[str, tuple[str, int, tuple[float, float] | None]] = {
    f"GPT of 10 M, {2 * GPT_ROWS} rows": ("gpt", 2, (1.6, 1.0)),
    f"GPT of 10 M, {4 * GPT_ROWS} rows": ("gpt", 4, (1.6, 1.0)),
    f"MLP of 25 M, {2 * MLP_ROWS} rows": ("mlp", 2, None),
    f"MLP of 25 M, {16 * MLP_ROWS} rows": ("mlp", 16, None),
}
ONE, THREADS, REPLICAS = "one thread", "threads within operators", "DataParallel"


@dataclass(frozen=True)
class Line:
    """The median step of a model in one way, beside so many busy processes."""

    model: str
    way: str
    beside: int
    p50_ms: float


def ways(name: str, times: int, cores: int) -> dict[str, Callable[[], float]]:
    """A step of each way; it returns its seconds."""
    task = make_task(name, 0)
    inputs, targets = (torch.cat([one] * times) for one in (task.inputs, task.targets))
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1e-3)

    def step(module: nn.Module, threads: int) -> float:
        torch.set_num_threads(threads)
        begin = time.perf_counter()
        optimizer.zero_grad()
        task.loss(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return time.perf_counter() - begin

    return {
        ONE: partial(step, task.model, 1),
        THREADS: partial(step, task.model, cores),
        REPLICAS: partial(step, dreamcomm.DataParallel(task.model, cores), cores),
    }


def measure(rounds: int, beside: int, cores: int) -> list[Line]:
    with busy_processes(beside):
        return [
            Line(model, way, beside, 1e3 * median(seconds))
            for model, (name, times, _) in CASES.items()
            for way, seconds in take_turns(
                ways(name, times, cores), rounds, warm_up=3, rotates=True
            ).items()
        ]


def speeds(lines: list[Line], model: str, beside: int) -> tuple[float, float]:
    """DataParallel's speed over one thread's, and over that of torch's threads."""
    ms = {one.way: one.p50_ms for one in lines if (one.model, one.beside) == (model, beside)}
    return ms[ONE] / ms[REPLICAS], ms[THREADS] / ms[REPLICAS]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each way.")] = 30,
    cores: Annotated[int, typer.Option(min=2, help="Replicas, and torch's threads.")] = 2,
    beside: BesideEach = None,
    json: Json = None,
) -> None:
    """Times steps; see the head of this file."""
    alone = [0, 1] if beside is None else beside
    lines = [line for count in alone for line in measure(rounds, count, cores)]
    measurement = Measurement(json)
    measurement.grid(
        f"A training step in one process, {cores} cores: ms (p50)",
        {
            (f"{one.model}: {one.way}", f"+ {one.beside} busy"): f"{one.p50_ms:,.1f}"
            for one in lines
        },
    )
    measurement.table(
        "Speed of DataParallel",
        ("", "busy processes", "of one thread", "of threads within operators", "goals"),
        (
            (
                model,
                count,
                *(f"{one:.2f}" for one in speeds(lines, model, count)),
                " and ".join(f"{one:.1f}" for one in goals) if goals and not count else "",
            )
            for count in alone
            for model, (_, _, goals) in CASES.items()
        ),
        names=1,
    )
    measurement.write(rounds=rounds, cores=cores, lines=[asdict(one) for one in lines])


if __name__ == "__main__":
    typer.run(main)
