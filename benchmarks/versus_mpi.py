"""Compares dreamcomm's all_reduce with that of the MPIs on this machine.

    python benchmarks/versus_mpi.py
    python benchmarks/versus_mpi.py --prefix DIR     # an MPI below DIR, too: pip's impi, a build

Both are called without torch between: MPI from a C program, dreamcomm's core from its own timing
loop. Either rewrites its rows before every sample, passes a barrier, and times one call on each
row; a call lasts until its slowest rank has returned. MPI and dreamcomm take turns for each size.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import dreamcomm
from machine import check_output, describe_machine, write_json
from mpi_programs import Mpi, MpiError, find_mpis

KIB = 1 << 10
SIZES = [size * KIB for size in (1, 4, 32, 256, 1 << 10, 8 << 10, 64 << 10, 256 << 10)]
BURST_BYTES, LONGEST_BURST = 256 * KIB, 16  # as in mpi/all_reduce.c
FULL_SAMPLES_BYTES = 8 << 20  # above, fewer samples: about as many bytes in all


@dataclass(frozen=True)
class Plan:
    """The result of the comparison, on every rank."""

    mpis: list[Mpi]
    sizes: list[int]
    rounds: int
    samples: int
    in_place: bool


@dataclass(frozen=True)
class Row:
    """One size: microseconds of a call (p50), of every round."""

    bytes: int
    mpi: dict[str, list[float]]
    staged: list[float]
    heap: list[float]

    def best(self) -> str:
        """The MPI whose middle round is fastest."""
        return min(self.mpi, key=lambda name: median(self.mpi[name]))

    def ratio(self, ours: list[float]) -> float:
        """The best MPI's time over ours, the middle round's.

        The ratio is taken in each round, because a virtual machine's cores are near each other at
        one moment and far apart at another, which changes all times several-fold.
        """
        pairs = zip(self.mpi[self.best()], ours, strict=True)
        return median(theirs / mine for theirs, mine in pairs)


def burst_of(size: int) -> int:
    return max(1, min(LONGEST_BURST, BURST_BYTES // size))


def samples_of(samples: int, size: int) -> int:
    return min(samples, max(5, samples * FULL_SAMPLES_BYTES // size))


def time_core(size: int, plan: Plan, heap: bool) -> float:
    """Microseconds of a call, p50; a call lasts as long as on its slowest rank."""
    shape = (burst_of(size), size // 4)
    make = dreamcomm.empty if heap else torch.empty
    rows = make(*shape)
    out = rows if plan.in_place else make(*shape).zero_()
    group = dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(torch.device("cpu"))
    samples = samples_of(plan.samples, size)
    backend._time_core("all_reduce", rows, out, max(1, samples // 5))
    seconds = torch.tensor(backend._time_core("all_reduce", rows, out, samples))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return 1e6 * seconds.median().item()


def run_rank(plan: Plan) -> list[Row]:
    """Rank 0 starts the MPI programs itself, while the other ranks sleep in a barrier."""
    rows = []
    for size in plan.sizes:
        mpi: dict[str, list[float]] = {choice.name: [] for choice in plan.mpis}
        staged, heap = [], []
        for _ in range(plan.rounds):
            if dist.get_rank() == 0:
                for choice in plan.mpis:
                    taken = choice.time_all_reduce(
                        dist.get_world_size(), size, plan.samples, plan.in_place
                    )
                    mpi[choice.name].append(taken)
            dist.barrier()
            staged.append(time_core(size, plan, heap=False))
            heap.append(time_core(size, plan, heap=True))
        rows.append(Row(size, mpi, staged, heap))
    return rows


def size_text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def print_rows(console: Console, rows: list[Row], ranks: int, in_place: bool) -> None:
    rounds = len(rows[0].staged)
    where = "in place" if in_place else "into another tensor"
    table = Table(
        title=f"all_reduce of float32, sum, {where}, {ranks} ranks: microseconds of a call (p50)",
        title_justify="left",
        caption=f"x: the best MPI's time / dreamcomm's, the median of {rounds} rounds' ratios",
        caption_justify="left",
    )
    for heading in ("size", "best MPI", "", "staged", "x", "heap", "x"):
        table.add_column(heading, justify="left" if heading == "best MPI" else "right")
    for row in rows:
        best = row.best()
        times = [f"{median(times):.1f}" for times in (row.mpi[best], row.staged, row.heap)]
        staged, heap = (f"{row.ratio(ours):.2f}" for ours in (row.staged, row.heap))
        table.add_row(size_text(row.bytes), best, times[0], times[1], staged, times[2], heap)
    console.print(table)


def as_json(rows: list[Row], plan: Plan, ranks: int) -> dict[str, Any]:
    found = [
        {
            **asdict(row),
            "best_mpi": row.best(),
            "mpi_over_staged": row.ratio(row.staged),
            "mpi_over_heap": row.ratio(row.heap),
        }
        for row in rows
    ]
    return {
        "machine": describe_machine(),
        "mpi": {choice.name: choice.version for choice in plan.mpis},
        "ranks": ranks,
        "in_place": plan.in_place,
        "rounds": plan.rounds,
        "microseconds": found,
    }


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Processes.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each at every size.")] = 3,
    samples: Annotated[int, typer.Option(min=5, help="Samples of a size up to 8 MiB.")] = 200,
    largest: Annotated[int, typer.Option(help="Leave out larger sizes, in bytes.")] = SIZES[-1],
    in_place: Annotated[bool, typer.Option(help="Sum into the same tensor.")] = True,
    prefix: Annotated[list[Path] | None, typer.Option(help="Where bin/mpicc is.")] = None,
    json: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
) -> None:
    """Compares all_reduce with MPI's; see the head of this file."""
    check_output(json)
    console = Console()
    with tempfile.TemporaryDirectory() as build:
        try:
            mpis = find_mpis([path.resolve() for path in prefix or []], Path(build))
        except MpiError as error:
            raise SystemExit(f"versus_mpi: {error}") from None
        for mpi in mpis:
            console.print(f"{mpi.name}: {mpi.version}", highlight=False)
        plan = Plan(mpis, [s for s in SIZES if s <= largest], rounds, samples, in_place)
        rows = dreamcomm.spawn(run_rank, ranks, args=(plan,))[0]
    print_rows(console, rows, ranks, in_place)
    if json is not None:
        write_json(json, as_json(rows, plan, ranks))


if __name__ == "__main__":
    typer.run(main)
