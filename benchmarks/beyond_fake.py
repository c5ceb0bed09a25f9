"""The cost of a small call beyond torch's own work: the same call on dreamcomm and on `fake`.

    python benchmarks/beyond_fake.py
    python benchmarks/beyond_fake.py --watches 12 --json fake.json

torch's `fake` backend returns at once, so its call is Python and dispatch alone. All ranks call
`dist.all_reduce` of 1 KiB in loops, in turns on either group. A watch is a second or two of such
turns: its figures are the medians of the loops' times a call, and beyond that of the differences
between neighbours in time, as the machine goes through phases.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch.testing._internal.distributed import fake_pg

import dreamcomm
from dreamcomm.tools.bench.measurement import Json, Measurement
from dreamcomm.tools.bench.turns import take_turns

SIZE = 1 << 10
CALLS = 300  # of a loop
Watch = dict[str, float]


def microseconds(group: dist.ProcessGroup, tensor: torch.Tensor) -> float:
    """Of a call in one loop."""
    begin = perf_counter()
    for _ in range(CALLS):
        dist.all_reduce(tensor, group=group)
    return (perf_counter() - begin) / CALLS * 1e6


def watch(groups: dict[str, dist.ProcessGroup], loops: int) -> Watch:
    tensor = torch.zeros(SIZE // 4)
    turns = {name: partial(microseconds, group, tensor) for name, group in groups.items()}
    ours, fake = take_turns(turns, loops).values()
    return {
        "dreamcomm": median(ours),
        "fake": median(fake),
        "beyond": median(a - b for a, b in zip(ours, fake, strict=True)),
        "least": min(ours) - min(fake),
    }


def run_rank(watches: int, loops: int) -> list[Watch]:
    assert fake_pg is not None  # its import registers the backend
    groups = {name: dist.new_group(backend=name) for name in ("dreamcomm", "fake")}
    watch(groups, 5)
    return [watch(groups, loops) for _ in range(watches)]


def main(
    watches: Annotated[int, typer.Option(min=1, help="How often to look.")] = 8,
    loops: Annotated[int, typer.Option(min=5, help="Loops of 300 calls in a watch.")] = 300,
    json: Json = None,
) -> None:
    """Times small calls beside torch's fake backend; see the head of this file."""
    found = dreamcomm.spawn(run_rank, 2, args=(watches, loops))[0]
    measurement = Measurement(json)
    measurement.table(
        f"all_reduce of {SIZE:,} bytes, 2 ranks: us of a call",
        [*found[0]],
        ([f"{figure:.2f}" for figure in figures.values()] for figures in found),
        names=0,
    )
    measurement.write(bytes=SIZE, microseconds=found)


if __name__ == "__main__":
    typer.run(main)
