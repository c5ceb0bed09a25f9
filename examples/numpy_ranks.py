"""Finds clusters by k-means on all ranks, with NumPy and no torch.

    torchrun --nproc-per-node 2 examples/numpy_ranks.py

Also `mpirun -n 2 python examples/numpy_ranks.py`, `srun -n 2 ...`, and plain python for one rank.
The points are the same for each number of ranks: each rank has its share of the blocks, and takes
one call for each step. So the result is that of one process, except for rounding.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import dreamcomm

BLOCKS, ROWS, CLUSTERS, STEPS = 8, 2000, 4, 12


def block(number: int) -> NDArray[np.float64]:
    """Points around the corners of a square."""
    random = np.random.default_rng(number)
    corners = np.array([[0.0, 0.0], [0.0, 4.0], [4.0, 0.0], [4.0, 4.0]])
    return corners[random.integers(CLUSTERS, size=ROWS)] + random.normal(size=(ROWS, 2))


def local_sums(points: NDArray[np.float64], centres: NDArray[np.float64]) -> dict[str, Any]:
    """The sums and counts of this rank's points by their nearest centre, and their inertia."""
    squares = ((points[:, None] - centres) ** 2).sum(axis=2)
    nearest = np.eye(CLUSTERS)[squares.argmin(axis=1)]
    inertia = squares.min(axis=1).sum(keepdims=True)
    return {"sums": nearest.T @ points, "counts": nearest.sum(axis=0), "inertia": inertia}


def main() -> None:
    """Runs k-means; rank 0 prints the result."""
    with dreamcomm.Communicator() as comm:
        points = np.concatenate([block(number) for number in range(comm.rank, BLOCKS, comm.size)])
        centres = comm.broadcast(points[:CLUSTERS])  # those of rank 0
        for _ in range(STEPS):
            total = comm.all_reduce(local_sums(points, centres))  # one call for the three arrays
            centres = total["sums"] / np.maximum(total["counts"], 1)[:, None]
        if comm.rank == 0:
            print(f"{comm.size} ranks, inertia {total['inertia'][0]:.6f}")
            for centre, count in zip(centres, total["counts"], strict=True):
                print(f"centre {centre[0]:.6f} {centre[1]:.6f}, {count:.0f} points")


if __name__ == "__main__":
    main()
