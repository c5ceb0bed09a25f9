"""What servers and workers count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ServerReport", "WorkerCounts", "WorkerReport"]

SHOWN = 12  # values of a histogram in a line


@dataclass
class WorkerCounts:
    """One worker, as its server sees it.

    Attributes:
        pushes: gradients received.
        pulls: weights sent, those after pushes too.
        pushed_bytes, pulled_bytes: of tensors, without headers.
        waited: seconds that its pushes have waited for other workers.
        state: "here", "left", or how it was lost.
    """

    pushes: int = 0
    pulls: int = 0
    pushed_bytes: int = 0
    pulled_bytes: int = 0
    waited: float = 0.0
    state: str = "here"


@dataclass(frozen=True)
class ServerReport:
    """What a server has done. ``str(report)`` is a table.

    Attributes:
        updates: steps of the optimizer in this life of the server.
        version: the same with those before its checkpoint.
        staleness: how often weights were read by a worker so many pushes ahead of the slowest.
        lag: how often gradients came that did not know of so many updates.
        workers: by rank.
    """

    updates: int
    version: int
    staleness: Mapping[int, int]
    lag: Mapping[int, int]
    workers: Mapping[int, WorkerCounts]

    def __str__(self) -> str:
        rows = [
            f"version {self.version}, {self.updates} updates",
            f"staleness of reads: {_histogram(self.staleness)}",
            f"lag of gradients:   {_histogram(self.lag)}",
            "worker  pushes   pulls     MB in    MB out  waited s  state",
        ]
        for rank, one in sorted(self.workers.items()):
            rows.append(
                f"{rank:6d}  {one.pushes:6d}  {one.pulls:6d}  {one.pushed_bytes / 1e6:8.1f}  "
                f"{one.pulled_bytes / 1e6:8.1f}  {one.waited:8.2f}  {one.state}"
            )
        return "\n".join(rows)


def _histogram(counts: Mapping[int, int]) -> str:
    """The lowest values and their counts; without a bound there may be hundreds."""
    found = sorted(counts.items())
    texts = [f"{value}: {count}" for value, count in found[:SHOWN]]
    if rest := found[SHOWN:]:
        texts.append(f"{rest[0][0]} to {rest[-1][0]}: {sum(count for _, count in rest)}")
    return ", ".join(texts) or "none"


@dataclass
class WorkerReport:
    """What a worker has done.

    Attributes:
        steps: calls of step().
        pushed_bytes, pulled_bytes: of tensors, to and from all servers.
        waited: seconds in which it waited for servers.
        staleness: how often it was so many pushes ahead of the slowest worker when it read weights.
    """

    steps: int = 0
    pushed_bytes: int = 0
    pulled_bytes: int = 0
    waited: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
