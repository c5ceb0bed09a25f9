"""Compares dreamcomm's all_reduce with that of the MPIs on this machine.

    python benchmarks/versus_mpi.py
    python benchmarks/versus_mpi.py --prefix DIR     # an MPI below DIR, too: pip's impi, a build

Both are called without torch between: MPI from a C program, dreamcomm's core from its own timing
loop. Either rewrites its rows before every sample, passes a barrier, and times one call on each
row; a call lasts until its slowest rank has returned. MPI and dreamcomm take turns for each size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import dreamcomm
from dreamcomm.tools.bench.measurement import Json, Measurement
from dreamcomm.tools.bench.sizes import format_size
from dreamcomm.tools.bench.turns import take_turns
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


def time_mpi(choice: Mpi, size: int, plan: Plan) -> float:
    """Rank 0 starts the MPI program itself, while the other ranks sleep in a barrier."""
    taken = 0.0
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        taken = choice.time_all_reduce(ranks, size, plan.samples, plan.in_place)
    dist.barrier()
    return taken


def run_rank(plan: Plan) -> list[Row]:
    rows = []
    for size in plan.sizes:
        turns: dict[str, Callable[[], float]] = {
            choice.name: partial(time_mpi, choice, size, plan) for choice in plan.mpis
        }
        turns["staged"] = partial(time_core, size, plan, heap=False)
        turns["heap"] = partial(time_core, size, plan, heap=True)
        found = take_turns(turns, plan.rounds)
        staged, heap = found.pop("staged"), found.pop("heap")
        rows.append(Row(size, found, staged, heap))
    return rows


def cells(row: Row) -> list[str]:
    best = row.best()
    times = [f"{median(times):.1f}" for times in (row.mpi[best], row.staged, row.heap)]
    staged, heap = (f"{row.ratio(ours):.2f}" for ours in (row.staged, row.heap))
    return [format_size(row.bytes), best, times[0], times[1], staged, times[2], heap]


def as_json(row: Row) -> dict[str, Any]:
    ratios = {"mpi_over_staged": row.ratio(row.staged), "mpi_over_heap": row.ratio(row.heap)}
    return asdict(row) | {"best_mpi": row.best()} | ratios


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Processes.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each at every size.")] = 3,
    samples: Annotated[int, typer.Option(min=5, help="Samples of a size up to 8 MiB.")] = 200,
    largest: Annotated[int, typer.Option(help="Leave out larger sizes, in bytes.")] = SIZES[-1],
    in_place: Annotated[bool, typer.Option(help="Sum into the same tensor.")] = True,
    prefix: Annotated[list[Path] | None, typer.Option(help="Where bin/mpicc is.")] = None,
    json: Json = None,
) -> None:
    """Compares all_reduce with MPI's; see the head of this file."""
    measurement = Measurement(json)
    with tempfile.TemporaryDirectory() as build:
        try:
            mpis = find_mpis([path.resolve() for path in prefix or []], Path(build))
        except MpiError as error:
            raise SystemExit(f"versus_mpi: {error}") from None
        for mpi in mpis:
            measurement.say(f"{mpi.name}: {mpi.version}")
        plan = Plan(mpis, [s for s in SIZES if s <= largest], rounds, samples, in_place)
        rows = dreamcomm.spawn(run_rank, ranks, args=(plan,))[0]
    where = "in place" if in_place else "into another tensor"
    measurement.table(
        f"all_reduce of float32, sum, {where}, {ranks} ranks: microseconds of a call (p50)",
        ("size", "best MPI", "", "staged", "x", "heap", "x"),
        map(cells, rows),
        names=2,
        caption=f"x: the best MPI's time / dreamcomm's, the median of {rounds} rounds' ratios",
    )
    measurement.write(
        mpi={choice.name: choice.version for choice in mpis},
        ranks=ranks,
        in_place=in_place,
        rounds=rounds,
        microseconds=[as_json(row) for row in rows],
    )


if __name__ == "__main__":
    typer.run(main)
