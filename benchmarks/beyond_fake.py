"""The cost of a small call beyond torch's own work: the same call on dreamcomm and on `fake`.

    python benchmarks/beyond_fake.py
    python benchmarks/beyond_fake.py --watches 12 --json fake.json

torch's `fake` backend returns at once, so its call is Python and dispatch alone. All ranks call
`dist.all_reduce` of 1 KiB in loops, in turns on either group. A watch is a second or two of such
turns: its figures are the medians of the loops' times a call, and beyond that of the differences
between neighbours in time, as the machine goes through phases.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed import fake_pg

import dreamcomm
from machine import check_output, describe_machine, write_json

SIZE = 1 << 10
CALLS = 300  # of a loop
Watch = dict[str, float]


def timed(group: dist.ProcessGroup, tensor: torch.Tensor) -> float:
    """Microseconds of a call in one loop."""
    begin = perf_counter()
    for _ in range(CALLS):
        dist.all_reduce(tensor, group=group)
    return (perf_counter() - begin) / CALLS * 1e6


def watch(ours: dist.ProcessGroup, fake: dist.ProcessGroup, loops: int) -> Watch:
    tensor = torch.zeros(SIZE // 4)
    pairs = [(timed(ours, tensor), timed(fake, tensor)) for _ in range(loops)]
    return {
        "dreamcomm": median(a for a, _ in pairs),
        "fake": median(b for _, b in pairs),
        "beyond": median(a - b for a, b in pairs),
        "least": min(a for a, _ in pairs) - min(b for _, b in pairs),
    }


def run_rank(watches: int, loops: int) -> list[Watch]:
    assert fake_pg is not None  # its import registers the backend
    fake = dist.new_group(backend="fake")
    ours = dist.new_group(backend="dreamcomm")
    watch(ours, fake, 5)
    return [watch(ours, fake, loops) for _ in range(watches)]


def print_watches(console: Console, watches: list[Watch]) -> None:
    table = Table(title=f"all_reduce of {SIZE:,} bytes, 2 ranks: us of a call")
    for name in watches[0]:
        table.add_column(name, justify="right")
    for figures in watches:
        table.add_row(*(f"{figure:.2f}" for figure in figures.values()))
    console.print(table)


def main(
    watches: Annotated[int, typer.Option(min=1, help="How often to look.")] = 8,
    loops: Annotated[int, typer.Option(min=5, help="Loops of 300 calls in a watch.")] = 300,
    json: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
) -> None:
    """Times small calls beside torch's fake backend; see the head of this file."""
    check_output(json)
    found = dreamcomm.spawn(run_rank, 2, args=(watches, loops))[0]
    print_watches(Console(), found)
    if json is not None:
        content = {"machine": describe_machine(), "bytes": SIZE, "microseconds": found}
        write_json(json, content)


if __name__ == "__main__":
    typer.run(main)
