"""Contiguous division against a search of all divisions."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from dreamcomm.pipeline.split import partition


def sums_of(costs: list[float], cuts: list[int], between: list[float]) -> list[float]:
    edges = [0.0, *between, 0.0]
    return [
        sum(costs[begin:end]) + edges[begin] + edges[end]
        for begin, end in pairwise([0, *cuts, len(costs)])
    ]


def by_search(costs: list[float], parts: int, between: list[float]) -> list[int]:
    def key(cuts: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        sums = sums_of(costs, list(cuts), between)
        return max(sums), sum(one * one for one in sums), cuts

    return list(min(combinations(range(1, len(costs)), parts - 1), key=key))


@pytest.mark.parametrize("seed", range(40))
def test_partition_finds_what_a_search_of_all_divisions_finds(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(8):
        layers = choose.randint(1, 12)
        parts = choose.randint(1, layers)
        # Whole numbers, with many ties, whose sums are exact.
        costs = [float(choose.randint(0, 6)) for _ in range(layers)]
        between = [float(choose.choice([0, 0, 1, 5])) for _ in range(layers - 1)]
        assert partition(costs, parts) == by_search(costs, parts, [0.0] * (layers - 1))
        assert partition(costs, parts, between=between) == by_search(costs, parts, between)


def test_partition_of_fractions_keeps_its_largest_sum() -> None:
    costs = [0.1, 0.2, 0.3] * 4
    cuts = partition(costs, 4)
    best = by_search(costs, 4, [0.0] * 11)
    zeros = [0.0] * 11
    assert max(sums_of(costs, cuts, zeros)) == pytest.approx(max(sums_of(costs, best, zeros)))


@pytest.mark.parametrize(
    ("costs", "parts", "between", "error"),
    [
        ([1.0, 2.0], 3, None, "2 layers do not make 3 parts"),
        ([1.0], 0, None, "at least 1 part, got 0"),
        ([1.0, -2.0], 2, None, "got -2.0 at index 1"),
        ([float("nan"), 1.0], 1, None, "got nan at index 0"),
        ([1.0, float("inf")], 1, None, "got inf at index 1"),
        ([1.0, 1.0], 2, [1.0, 1.0], "expected 1 costs between 2 layers, got 2"),
        ([1.0, 1.0], 2, [-1.0], "cost between layers"),
    ],
)
def test_partition_names_what_is_wrong(
    costs: list[float], parts: int, between: list[float] | None, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        partition(costs, parts, between=between)
