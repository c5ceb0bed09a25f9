"""Compares dreamcomm's all_reduce with that of the MPIs on this machine.

    python benchmarks/versus_mpi.py
    python benchmarks/versus_mpi.py --prefix DIR     # an MPI below DIR, too: pip's impi, a build
    python benchmarks/versus_mpi.py --python         # NumPy arrays: mpi4py and Communicator
    python benchmarks/versus_mpi.py --python --beside 2

From C, both are called without torch between: MPI from a C program, dreamcomm's core from its own
timing loop. From Python, one loop calls both (numpy_all_reduce.py). Either rewrites its rows before
every sample, passes a barrier, and times one call on each row; a call lasts until its slowest rank
has returned. MPI and dreamcomm take turns for each size.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer

import dreamcomm
from dreamcomm.tools.bench.busy import busy_processes, words
from dreamcomm.tools.bench.measurement import Beside, Json, Measurement
from dreamcomm.tools.bench.sizes import format_size
from dreamcomm.tools.bench.turns import slowest_here, take_turns
from mpi_programs import Mpi, MpiError, find_mpis
from numpy_all_reduce import Floats, samples_of, shape_of, time_all_reduce

KIB = 1 << 10
SIZES = [size * KIB for size in (1, 4, 32, 256, 1 << 10, 8 << 10, 64 << 10, 256 << 10)]


@dataclass(frozen=True)
class Plan:
    """The result of the comparison, on every rank."""

    mpis: list[Mpi]
    sizes: list[int]
    rounds: int
    samples: int
    in_place: bool
    python: bool


@dataclass(frozen=True)
class Row:
    """One size: microseconds of a call (p50), of every round."""

    bytes: int
    mpi: dict[str, list[float]]
    ours: dict[str, list[float]]  # staged and heap; from Python: private, heap and torch

    def best(self) -> str:
        """The MPI whose middle round is fastest."""
        return min(self.mpi, key=lambda name: median(self.mpi[name]))

    def ratio(self, ours: str) -> float:
        """The best MPI's time over ours, the middle round's."""
        return middle_ratio(self.mpi[self.best()], self.ours[ours])


def middle_ratio(theirs: list[float], ours: list[float]) -> float:
    """The middle round's ratio.

    The ratio is taken in each round, because a virtual machine's cores are near each other at one
    moment and far apart at another, which changes all times several-fold.
    """
    return median(one / other for one, other in zip(theirs, ours, strict=True))


def time_core(size: int, plan: Plan, heap: bool) -> float:
    """Microseconds of a call, p50; a call lasts as long as on its slowest rank."""
    shape = shape_of(size)
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


def time_arrays(size: int, plan: Plan, comm: dreamcomm.Communicator, heap: bool) -> float:
    """As time_core, of the Communicator on a NumPy array."""

    def call(row: Floats) -> None:
        comm.all_reduce(row, out=row)

    shape = shape_of(size)
    memory = comm.empty(shape, np.float32) if heap else np.empty(shape, np.float32)
    rows = [*memory]
    seconds = time_all_reduce(call, rows, memory, comm.barrier, plan.samples, comm.size)
    return 1e6 * median(slowest_here(seconds))


def time_tensors(size: int, plan: Plan, comm: dreamcomm.Communicator) -> float:
    """As time_arrays, of torch.distributed on a tensor in the same kind of memory."""

    def call(row: torch.Tensor) -> None:
        dist.all_reduce(row)

    memory = np.empty(shape_of(size), np.float32)
    rows = [*torch.from_numpy(memory)]
    seconds = time_all_reduce(call, rows, memory, comm.barrier, plan.samples, comm.size)
    return 1e6 * median(slowest_here(seconds))


def time_mpi(choice: Mpi, size: int, plan: Plan) -> float:
    """Rank 0 starts the MPI program itself, while the other ranks sleep in a barrier."""
    taken = 0.0
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        taken = choice.time_all_reduce(ranks, size, plan.samples, plan.in_place)
    dist.barrier()
    return taken


def ways_of(size: int, plan: Plan) -> dict[str, Callable[[], float]]:
    """Dreamcomm's turns."""
    if not plan.python:
        return {
            "staged": partial(time_core, size, plan, heap=False),
            "heap": partial(time_core, size, plan, heap=True),
        }
    comm = dreamcomm.Communicator()  # of the group that spawn has made
    return {
        "private": partial(time_arrays, size, plan, comm, heap=False),
        "heap": partial(time_arrays, size, plan, comm, heap=True),
        "torch": partial(time_tensors, size, plan, comm),
    }


def run_rank(plan: Plan) -> list[Row]:
    rows = []
    for size in plan.sizes:
        ways = ways_of(size, plan)
        turns: dict[str, Callable[[], float]] = {
            choice.name: partial(time_mpi, choice, size, plan) for choice in plan.mpis
        }
        found = take_turns(turns | ways, plan.rounds)
        ours = {name: found.pop(name) for name in ways}
        rows.append(Row(size, found, ours))
    return rows


def cells(row: Row) -> list[str]:
    best = row.best()
    texts = [format_size(row.bytes), best, f"{median(row.mpi[best]):.1f}"]
    for name, times in row.ours.items():
        ratio = against_torch(row) if name == "torch" else row.ratio(name)
        texts += [f"{median(times):.1f}", f"{ratio:.2f}"]
    return texts


def against_torch(row: Row) -> float:
    return middle_ratio(row.ours["private"], row.ours["torch"])


def as_json(row: Row) -> dict[str, Any]:
    ratios = {f"mpi_over_{name}": row.ratio(name) for name in row.ours}
    if "torch" in row.ours:
        ratios["private_over_torch"] = against_torch(row)
    return {"bytes": row.bytes, "mpi": row.mpi, **row.ours, "best_mpi": row.best(), **ratios}


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Processes.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each at every size.")] = 3,
    samples: Annotated[int, typer.Option(min=5, help="Samples of a size up to 8 MiB.")] = 200,
    largest: Annotated[
        int | None, typer.Option(help="Leave out larger sizes, in bytes; from Python, 64 MiB.")
    ] = None,
    in_place: Annotated[bool, typer.Option(help="Sum into the same tensor.")] = True,
    python: Annotated[
        bool, typer.Option("--python", help="Call from Python; needs mpi4py.")
    ] = False,
    beside: Beside = 0,
    prefix: Annotated[list[Path] | None, typer.Option(help="Where bin/mpicc is.")] = None,
    json: Json = None,
) -> None:
    """Compares all_reduce with MPI's; see the head of this file."""
    if python and not in_place:
        raise typer.BadParameter("calls from Python are in place", param_hint="--no-in-place")
    most = largest or SIZES[-2 if python else -1]
    with tempfile.TemporaryDirectory() as build:
        prefixes = [path.resolve() for path in prefix or []]
        try:
            mpis = find_mpis(prefixes, Path(build), python=python, yields=beside > 0)
        except MpiError as error:
            raise SystemExit(f"versus_mpi: {error}") from None
        measurement = Measurement(json, **(python_versions() if python else {}))
        for mpi in mpis:
            measurement.say(f"{mpi.name}: {mpi.version}")
        plan = Plan(mpis, [s for s in SIZES if s <= most], rounds, samples, in_place, python)
        with busy_processes(beside):
            rows = dreamcomm.spawn(run_rank, ranks, args=(plan,))[0]
    where = "in place" if in_place else "into another tensor"
    caller = "from Python" if python else "from C"
    title = f"all_reduce of float32, sum, {where}, {caller}, {ranks} ranks {words(beside)}".strip()
    x = f"x: the best MPI's time / dreamcomm's, the median of {rounds} rounds' ratios"
    ours = ("private", "x", "heap", "x", "torch", "private / torch")
    measurement.table(
        f"{title}: microseconds of a call (p50)",
        ("size", "best MPI", "", *(ours if python else ("staged", "x", "heap", "x"))),
        map(cells, rows),
        names=2,
        caption=f"{x}\ntorch: torch.distributed.all_reduce, on dreamcomm" if python else x,
    )
    measurement.write(
        mpi={choice.name: choice.version for choice in mpis},
        ranks=ranks,
        in_place=in_place,
        called_from="Python" if python else "C",
        beside=beside,
        rounds=rounds,
        microseconds=[as_json(row) for row in rows],
    )


def python_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("numpy", "mpi4py")}


if __name__ == "__main__":
    typer.run(main)
