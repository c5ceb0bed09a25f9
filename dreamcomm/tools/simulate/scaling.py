"""A cluster that grows: one line for each number of its hosts."""

from __future__ import annotations

from dataclasses import dataclass

from dreamcomm.tools.simulate.cluster import MOST_RANKS, Cluster
from dreamcomm.tools.simulate.predict import (
    Forecast,
    Step,
    Training,
    collective,
    ddp_step,
    ring_all_reduce,
)


@dataclass(frozen=True)
class Line:
    """The predictions for a cluster of some size.

    by_size: the collective's prediction for each number of bytes; a barrier has only 0.
    ring: the seconds of a flat ring for each number of bytes, for all_reduce only.
    step: None if no training was described.
    """

    hosts: int
    ranks: int
    by_size: dict[int, Forecast]
    ring: dict[int, float]
    step: Step | None


def line_of(op: str, sizes: list[int], cluster: Cluster, training: Training | None) -> Line:
    """Raises ValueError if the operation is no collective."""
    sizes = [0] if op == "barrier" else sizes
    rings = sizes if op == "all_reduce" and cluster.size > 1 else []
    return Line(
        hosts=len(cluster.ranks_on),
        ranks=cluster.size,
        by_size={nbytes: collective(op, nbytes, cluster) for nbytes in sizes},
        ring={nbytes: ring_all_reduce(nbytes, cluster) for nbytes in rings},
        step=ddp_step(training, cluster) if training else None,
    )


def host_counts(cluster: Cluster, up_to: int) -> list[int]:
    """1, 2, 4, ... hosts like the cluster's, up to ``up_to`` ranks.

    Raises:
        ValueError: the hosts are not alike, not even one has so few ranks, or they are more than
            the model is for.
    """
    if len(set(cluster.ranks_on)) > 1:
        raise ValueError(
            f"a cluster grows by hosts that are alike, and these have {min(cluster.ranks_on)} to "
            f"{max(cluster.ranks_on)} ranks: give hosts and ranks_per_host, or leave --up-to out"
        )
    ranks = cluster.ranks_on[0]
    if not ranks <= up_to <= MOST_RANKS:
        raise ValueError(f"expected {ranks} (one host) to {MOST_RANKS} ranks, got {up_to}")
    counts = [1]
    while counts[-1] * 2 * ranks <= up_to:
        counts.append(counts[-1] * 2)
    return counts


def scaling(
    op: str, sizes: list[int], cluster: Cluster, up_to: int, training: Training | None
) -> list[Line]:
    """Raises ValueError as :func:`host_counts` and :func:`line_of`."""
    return [
        line_of(op, sizes, cluster.with_hosts(hosts), training)
        for hosts in host_counts(cluster, up_to)
    ]
