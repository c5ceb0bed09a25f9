"""Turns durations into figures: percentiles and bandwidths. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dreamcomm.tools.bench.operations import OPERATIONS


@dataclass(frozen=True)
class Timing:
    """The figures of one variant. Times in seconds, bandwidths in GB/s (1e9 bytes)."""

    calls: int
    p50: float
    p99: float
    algbw: float
    busbw: float
    of_ceiling: float | None  # the ceiling's p50 / this p50


def across_ranks(by_rank: list[list[float]]) -> list[float]:
    """The time of each call: the ranks' average, as nccl-tests reports by default."""
    return [sum(call) / len(call) for call in zip(*by_rank, strict=True)]


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of 100 values do not exceed."""
    return sorted(values)[max(1, math.ceil(percent / 100 * len(values))) - 1]


def bandwidths(op: str, nbytes: int, world: int, seconds: float) -> tuple[float, float]:
    """algbw and busbw in GB/s, as nccl-tests defines them."""
    algbw = nbytes / seconds / 1e9
    return algbw, algbw * OPERATIONS[op].bus(world)


def summarize(
    op: str, nbytes: int, world: int, durations: dict[str, list[float]], ceiling: str
) -> dict[str, Timing]:
    """The figures of every variant; ``ceiling`` names the one that the others are held against."""
    medians = {name: percentile(values, 50) for name, values in durations.items()}
    limit = medians.get(ceiling)
    return {
        name: Timing(
            len(values),
            medians[name],
            percentile(values, 99),
            *bandwidths(op, nbytes, world, medians[name]),
            None if limit is None else limit / medians[name],
        )
        for name, values in durations.items()
    }
