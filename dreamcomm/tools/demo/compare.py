"""Runs the same training on each backend in turn and compares the results."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from dreamcomm.launch import spawn
from dreamcomm.tools.demo.train import RankResult, Settings, train_rank

# Left out of the step time: the first steps have cold caches and rebuild DDP's buckets.
COLD_STEPS = 5


@dataclass(frozen=True)
class BackendRun:
    """One backend's run, seen over all its ranks. Times in seconds, losses in nats per byte."""

    backend: str
    ranks: list[RankResult]

    def losses(self) -> list[float]:
        """The loss of each step, the mean over the ranks."""
        columns = zip(*(rank.losses for rank in self.ranks), strict=True)
        return [sum(column) / len(column) for column in columns]

    def step_times(self) -> list[float]:
        """The time of each step except the first few: the slowest rank's, since all wait for it."""
        slowest = [max(c) for c in zip(*(rank.step_times for rank in self.ranks), strict=True)]
        return slowest[COLD_STEPS:] or slowest

    def communication_share(self) -> float:
        """The share of a step's time that a step without the gradient exchange saves, 0 to 1."""
        synced = median(t for rank in self.ranks for t in rank.synced_times)
        unsynced = median(t for rank in self.ranks for t in rank.unsynced_times)
        return max(0.0, 1 - unsynced / synced)

    def validation_loss(self) -> float:
        return self.ranks[0].validation_loss


@dataclass(frozen=True)
class Comparison:
    """How far two runs agree: every rank's loss of every step, and the final weights."""

    values: int
    differing: int
    largest_difference: float
    weights_equal: bool

    @property
    def equal(self) -> bool:
        return self.differing == 0 and self.weights_equal


def run_backend(backend: str, ranks: int, settings: Settings) -> BackendRun:
    """Starts the ranks, trains, and gathers their measurements."""
    results = spawn(
        train_rank, ranks, args=(settings, backend), backend=backend, start_method="spawn"
    )
    return BackendRun(backend, results)


def compare(one: BackendRun, other: BackendRun) -> Comparison:
    """Compares bit by bit: losses are float32 values, exact in Python's floats; NaN is unequal."""
    pairs = [
        pair
        for a, b in zip(one.ranks, other.ranks, strict=True)
        for pair in zip(a.losses, b.losses, strict=True)
    ]
    differences = [abs(a - b) for a, b in pairs if a != b]
    digests = {rank.weights_digest for run in (one, other) for rank in run.ranks}
    return Comparison(
        len(pairs), len(differences), max(differences, default=0.0), weights_equal=len(digests) == 1
    )
