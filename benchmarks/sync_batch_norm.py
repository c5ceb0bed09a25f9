"""Times SyncBatchNorm beside BatchNorm: a layer without calls, its calls, and a CNN's step.

    python benchmarks/sync_batch_norm.py --json sync_batch_norm.json    # 2 minutes
    python benchmarks/sync_batch_norm.py --rounds 20 --beside 0

Two ranks of one thread. All lines take turns in one run of the same processes. Everything is
measured twice: with no other program, and beside a busy process.

Layer: forward and backward of (8, 64, 32, 32) in float32, in a group of one, so without calls.
Calls: the two calls of a layer with 64 channels, a hundred times a turn, beside an all_reduce of as
many bytes on the same group; and the same with what is packed and compared around them.
Step: a CNN of nine such layers under dreamcomm's DistributedDataParallel, with SGD.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn import functional as F

import dreamcomm
from dreamcomm.sync_batch_norm.calls import Kind
from dreamcomm.tools.bench.busy import busy_processes
from dreamcomm.tools.bench.measurement import BesideEach, Json, Measurement
from dreamcomm.tools.bench.turns import lasted, spanned, take_turns

SHAPE, CALLS, CLASSES = (8, 64, 32, 32), 100, 10
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
PAIRS = {  # a line, what it is compared with, and the largest ratio wanted
    "layer, contiguous": ("BatchNorm, contiguous", 1.25),
    "layer, channels last": ("BatchNorm, channels last", 1.25),
    "forward call": ("all_reduce", 1.3),
    "backward call": ("all_reduce", 1.3),
    "step": ("BatchNorm's step", 1.10),
}


@dataclass(frozen=True)
class Line:
    """The median of a line beside so many busy processes; a call's is of one of a turn's."""

    name: str
    beside: int
    p50_us: float


@dataclass(frozen=True)
class Comparison:
    """A line's median over that of another."""

    name: str
    other: str
    beside: int
    ratio: float
    goal: float


def layers() -> dict[str, Callable[[], Any]]:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    found: dict[str, Callable[[], Any]] = {}
    for name, layout in FORMATS.items():
        x, gradient = (torch.randn(SHAPE).contiguous(memory_format=layout) for _ in range(2))
        x.requires_grad_()

        def run(layer: nn.Module, x: Tensor = x, gradient: Tensor = gradient) -> None:
            layer(x).backward(gradient)
            x.grad = None
            layer.zero_grad()

        found[f"BatchNorm, {name}"] = partial(run, nn.BatchNorm2d(SHAPE[1]))
        own = dreamcomm.SyncBatchNorm(SHAPE[1], process_group=alone)
        found[f"layer, {name}"] = partial(run, own)
    return found


def calls() -> dict[str, Callable[[], Any]]:
    made = dreamcomm.SyncBatchNorm(SHAPE[1]).calls()
    mean, variance = torch.zeros(SHAPE[1]), torch.ones(SHAPE[1])
    sums = torch.zeros(2 * SHAPE[1], dtype=torch.float64)
    row = torch.zeros(3 + 2 * SHAPE[1], dtype=torch.float64)

    def repeated(call: Callable[[], Any]) -> None:
        for _ in range(CALLS):
            call()

    return {
        "all_reduce": partial(repeated, lambda: dist.all_reduce(row, group=made.group)),
        "forward call": partial(repeated, lambda: made.gather_rows(row)),
        "backward call": partial(repeated, lambda: made.add_up(row)),
        "forward call, whole": partial(
            repeated, lambda: made.gather(Kind.WITH_BACKWARD, 100, mean, variance)
        ),
        "backward call, whole": partial(repeated, lambda: made.add(sums)),
    }


def network() -> nn.Module:
    torch.manual_seed(0)
    widths = [3, *[SHAPE[1]] * 9]
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        parts += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def steps() -> dict[str, Callable[[], Any]]:
    x, y = torch.randn(SHAPE[0], 3, *SHAPE[2:]), torch.randint(CLASSES, SHAPE[:1])
    modules = {
        "BatchNorm's step": network(),
        "step": dreamcomm.convert_sync_batchnorm(network()),
    }

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    models = {n: dreamcomm.DistributedDataParallel(one) for n, one in modules.items()}
    return {
        n: partial(step, m, torch.optim.SGD(m.parameters(), lr=0.01)) for n, m in models.items()
    }


def run_rank(rounds: int) -> dict[str, list[Any]]:
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {}
    for lines in (layers(), calls(), steps()):
        turns = {name: partial(spanned, call) for name, call in lines.items()}
        found |= take_turns(turns, rounds, warm_up=3, rotates=True)
    return found


def measure(rounds: int, beside: int) -> tuple[list[Line], list[Comparison]]:
    with busy_processes(beside):
        seconds = lasted(dreamcomm.spawn(run_rank, 2, args=(rounds,)))
    of_one = {name: CALLS if "call" in name or name == "all_reduce" else 1 for name in seconds}
    middle = {name: 1e6 * median(times) / of_one[name] for name, times in seconds.items()}
    return (
        [Line(name, beside, value) for name, value in middle.items()],
        [
            Comparison(name, other, beside, middle[name] / middle[other], goal)
            for name, (other, goal) in PAIRS.items()
        ],
    )


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each line.")] = 40,
    beside: BesideEach = None,
    json: Json = None,
) -> None:
    """Times layers, calls and steps; see the head of this file."""
    lines: list[Line] = []
    comparisons: list[Comparison] = []
    for count in [0, 1] if beside is None else beside:
        found = measure(rounds, count)
        lines += found[0]
        comparisons += found[1]
    measurement = Measurement(json)
    measurement.grid(
        "SyncBatchNorm, 2 ranks: us (p50)",
        {(one.name, f"+ {one.beside} busy"): f"{one.p50_us:,.1f}" for one in lines},
    )
    measurement.table(
        "Ratios",
        ("", "of", "busy processes", "ratio", "goal"),
        (
            (one.name, one.other, one.beside, f"{one.ratio:.2f}", f"{one.goal:.2f}")
            for one in comparisons
        ),
        names=2,
    )
    measurement.write(
        rounds=rounds,
        shape=list(SHAPE),
        lines=[asdict(one) for one in lines],
        comparisons=[asdict(one) for one in comparisons],
    )


if __name__ == "__main__":
    typer.run(main)
