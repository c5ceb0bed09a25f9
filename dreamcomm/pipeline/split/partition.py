"""Divides a sequence of costs into contiguous parts whose largest sum is as small as possible.

The slowest stage sets the pace of a pipeline, so its cost is what is minimised; among divisions
that are equally good in that, the one with the smallest sum of squares balances the other stages.

    costs   5  1  1  1  4  4        partition(costs, 3) == [1, 4]
          | 5 | 1  1  1 | 4  4 |    sums 5, 3, 8
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = ["partition"]

_Cost = Callable[[int, int], float]  # of a part, by its first layer and the one after its last


def partition(
    costs: Sequence[float], parts: int, *, between: Sequence[float] | None = None
) -> list[int]:
    """Divides layers into contiguous, non-empty parts by dynamic programming.

    Args:
        costs: of each layer.
        parts: how many.
        between: ``between[i]`` is what a cut between layers i and i + 1 adds to the parts on both
            its sides, for example the time to send that layer's output; None is nothing.

    Returns:
        The indices of the layers at which parts 1, 2, ... begin. Among equally good divisions (the
        largest sum first, then the sum of squares) the one whose parts begin earliest.

    Raises:
        ValueError: fewer layers than parts, ``parts`` below 1, a cost that is negative or not
            finite, or a ``between`` of another length than ``len(costs) - 1``.
    """
    count = len(costs)
    cut = [0.0] * max(count - 1, 0) if between is None else [float(one) for one in between]
    _check(costs, parts, cut)
    sums = [0.0]
    for one in costs:
        sums.append(sums[-1] + one)
    edges = [0.0, *cut, 0.0]  # edges[i] is paid where a part begins or ends before layer i

    def cost(begin: int, end: int) -> float:
        return sums[end] - sums[begin] + edges[begin] + edges[end]

    return _most_even(cost, count, parts, _smallest_maximum(cost, count, parts))


def _check(costs: Sequence[float], parts: int, between: list[float]) -> None:
    if parts < 1:
        raise ValueError(f"partition: expected at least 1 part, got {parts}")
    if len(costs) < parts:
        raise ValueError(f"partition: {len(costs)} layers do not make {parts} parts")
    if len(between) != len(costs) - 1:
        raise ValueError(
            f"partition: expected {len(costs) - 1} costs between {len(costs)} layers, "
            f"got {len(between)}"
        )
    for what, values in (("cost", costs), ("cost between layers", between)):
        for index, one in enumerate(values):
            if not (math.isfinite(one) and one >= 0):
                raise ValueError(
                    f"partition: expected each {what} to be a finite number >= 0, "
                    f"got {one} at index {index}"
                )


def _smallest_maximum(cost: _Cost, count: int, parts: int) -> float:
    """The largest sum of the best division."""
    best = [cost(begin, count) for begin in range(count)]
    for _ in range(parts - 1):
        best = [
            min(
                (max(cost(begin, end), best[end]) for end in range(begin + 1, count)),
                default=math.inf,
            )
            for begin in range(count)
        ]
    return best[0]


def _most_even(cost: _Cost, count: int, parts: int, limit: float) -> list[int]:
    """The division with the smallest sum of squares among those with no sum above ``limit``."""

    def squared(begin: int, end: int) -> float:
        one = cost(begin, end)
        return one * one if one <= limit else math.inf

    # best[i]: the sum of squares of layers i.., and where the parts after the first begin
    best = [(squared(begin, count), list[int]()) for begin in range(count)]
    for _ in range(parts - 1):
        best = [
            min(
                (
                    (squared(begin, end) + best[end][0], [end, *best[end][1]])
                    for end in range(begin + 1, count)
                ),
                default=(math.inf, []),
            )
            for begin in range(count)
        ]
    return best[0][1]
