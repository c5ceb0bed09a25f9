"""Times all_reduce of NumPy arrays: the loop of both sides of versus_mpi.py, and mpi4py's program.

    mpirun -n 2 python benchmarks/numpy_all_reduce.py SAMPLES 1 BYTES     # 1: in place, as always

It measures as mpi/all_reduce.c does. A sample rewrites its rows, passes a barrier, and then times
one call on each row. MPI's ranks import neither torch nor dreamcomm.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

BURST_BYTES, LONGEST_BURST = 256 << 10, 16  # as in mpi/all_reduce.c
FULL_SAMPLES_BYTES = 8 << 20  # above, fewer samples: about as many bytes in all
FILL = 0.75  # sums of up to 2^24 such floats are exact

R = TypeVar("R")
Floats = NDArray[np.float32]


def burst_of(size: int) -> int:
    return max(1, min(LONGEST_BURST, BURST_BYTES // size))


def samples_of(samples: int, size: int) -> int:
    return min(samples, max(5, samples * FULL_SAMPLES_BYTES // size))


def shape_of(size: int) -> tuple[int, int]:
    """The rows of one sample, and the elements of a row."""
    return burst_of(size), size // 4


def time_calls(
    call: Callable[[R], object],
    rows: Sequence[R],
    memory: Floats,
    barrier: Callable[[], object],
    samples: int,
) -> list[float]:
    """Seconds of every call. ``rows``: the rows of ``memory``, as ``call`` takes them."""
    seconds = []
    for _ in range(samples):
        memory.fill(FILL)
        barrier()
        for row in rows:
            begin = perf_counter()
            call(row)
            seconds.append(perf_counter() - begin)
    return seconds


def time_all_reduce(
    call: Callable[[R], object],
    rows: Sequence[R],
    memory: Floats,
    barrier: Callable[[], object],
    samples: int,
    ranks: int,
) -> list[float]:
    """As :func:`time_calls`, after a warm-up. Checks the sums of the last sample."""
    samples = samples_of(samples, memory[0].nbytes)
    time_calls(call, rows, memory, barrier, max(1, samples // 5))
    seconds = time_calls(call, rows, memory, barrier, samples)
    if not np.all(memory == FILL * ranks):
        raise SystemExit("numpy_all_reduce: a wrong sum")
    return seconds


def main() -> None:
    """Runs a rank of mpi4py's program. Rank 0 prints microseconds of a call on its slowest rank."""
    mpi: Any = importlib.import_module("mpi4py.MPI")  # optional: a type checker may not find it
    comm, in_place = mpi.COMM_WORLD, mpi.IN_PLACE
    if len(sys.argv) != 4 or sys.argv[2] != "1":
        raise SystemExit("usage: numpy_all_reduce.py SAMPLES 1 BYTES")
    samples, size = int(sys.argv[1]), int(sys.argv[3])

    def call(row: Floats) -> None:
        comm.Allreduce(in_place, row)

    memory = np.empty(shape_of(size), np.float32)
    mine = np.array(time_all_reduce(call, [*memory], memory, comm.Barrier, samples, comm.size))
    slowest = np.empty_like(mine)
    comm.Reduce(mine, slowest, mpi.MAX)
    if comm.rank == 0:
        print(json.dumps({"bytes": size, "calls": len(mine), "p50_us": 1e6 * median(slowest)}))


if __name__ == "__main__":
    main()
