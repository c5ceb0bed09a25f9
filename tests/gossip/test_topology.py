"""Matrices of weights, what is refused of them, and delays that do not make gossip diverge."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from dreamcomm.gossip.delays import damping, drawn_delay
from dreamcomm.gossip.topology import TOPOLOGIES, Topology, named_topology
from dreamcomm.gossip.weights import given_topology
from gossip.simulated import Simulated

RANKS = [1, 2, 3, 4, 5, 7, 8, 16]
THIRD = 1 / 3


def drawn(text: str) -> list[list[float]]:
    """A matrix as the module's docstring draws it."""
    values = {".": 0.0, "1/2": 0.5, "1/3": THIRD}
    return [[values[one] for one in line.split()] for line in text.strip().splitlines()]


DRAWN = {
    "ring": ["1/3 1/3 . 1/3\n1/3 1/3 1/3 .\n. 1/3 1/3 1/3\n1/3 . 1/3 1/3"],
    "shift_one": [
        "1/2 . 1/2 .\n. 1/2 . 1/2\n1/2 . 1/2 .\n. 1/2 . 1/2",
        "1/2 . . 1/2\n. 1/2 1/2 .\n. 1/2 1/2 .\n1/2 . . 1/2",
    ],
    "exponential": [
        "1/2 . . 1/2\n1/2 1/2 . .\n. 1/2 1/2 .\n. . 1/2 1/2",
        "1/2 . 1/2 .\n. 1/2 . 1/2\n1/2 . 1/2 .\n. 1/2 . 1/2",
    ],
}


@pytest.mark.parametrize("name", DRAWN)
def test_four_ranks_have_the_drawn_weights(name: str) -> None:
    found = np.array(named_topology(name, 4).matrices)
    assert np.allclose(found, [drawn(one) for one in DRAWN[name]])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_known_topologies_are_accepted_as_weights(name: str, ranks: int) -> None:
    """So their rows and columns sum to 1, and they bring all ranks together."""
    made = named_topology(name, ranks)
    assert given_topology("ring", made.matrices, ranks) == made
    for number in range(2 * made.period):
        for rank in range(ranks):
            for peer, weight in made.sources(rank, number):
                assert rank in made.targets(peer, number)
                assert weight == made.matrix(number)[rank][peer]
            assert rank not in made.targets(rank, number)


@pytest.mark.parametrize(("ranks", "halves"), [(3, 2), (5, 3), (7, 4)])
def test_one_of_an_odd_number_of_ranks_keeps_its_own(ranks: int, halves: int) -> None:
    made = named_topology("shift_one", ranks)
    assert made.period == halves
    alone = []
    for number in range(halves):
        peers = {rank: made.sources(rank, number) for rank in range(ranks)}
        alone += [rank for rank, found in peers.items() if not found]
        for rank, found in peers.items():
            assert all(peers[peer] == ((rank, 0.5),) for peer, _ in found)
    assert sorted(alone) == list(range(halves))  # each of the first half once


def test_the_ring_contracts_by_its_second_eigenvalue() -> None:
    for ranks in (4, 5, 8):
        expected = abs(1 + 2 * math.cos(2 * math.pi / ranks)) / 3
        assert named_topology("ring", ranks).contraction() == pytest.approx(expected)


RING_PARTLY = [[0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0, 0.25, 0.25, 0.5], [0, 0, 0.5, 0.5]]
ONE_WAY = [[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]]
UNEQUAL = [[0.1, 0.9, 0], [0, 0.1, 0.9], [0.9, 0, 0.1]]


@pytest.mark.parametrize(
    "weights",
    [
        RING_PARTLY,
        [RING_PARTLY, RING_PARTLY],
        np.array(RING_PARTLY),
        torch.tensor(RING_PARTLY),
        torch.tensor([RING_PARTLY, RING_PARTLY]),
        [np.array(RING_PARTLY, dtype=np.float32), torch.tensor(RING_PARTLY)],
        tuple(tuple(row) for row in RING_PARTLY),
    ],
    ids=["list", "two", "array", "tensor", "tensors", "mixed", "tuple"],
)
def test_weights_are_taken_in_any_form(weights: Any) -> None:
    made = given_topology("ring", weights, 4)
    assert np.array_equal(made.matrix(0), RING_PARTLY)
    assert made.sources(1, 0) == ((0, 0.5), (2, 0.25))


IDENTITY = [[1.0, 0.0], [0.0, 1.0]]
PAIRS = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("weights", "ranks", "words"),
    [
        ([[0.5, 0.5], [0.5, 0.4]], 2, "row 1 sums to 0.9, and not to 1"),
        ([[0.5, 0.5], [0.4, 0.6]], 2, "column 0 sums to 0.9, and not to 1"),
        ([ONE_WAY, [[1, 0, 0], [0, 1, 0], [0, 1, 0]]], 3, "weights[1]: column 1 sums to 2"),
        ([[0.5, 0.5 + 3e-6], [0.5, 0.5]], 2, "row 0 sums to 1.000003"),
        ([[-0.5, 1.5], [1.5, -0.5]], 2, "row 0, column 0 is -0.5"),
        ([[math.nan, 1], [1, 0]], 2, "row 0, column 0 is nan"),
        ([[math.inf, 0], [0, 1]], 2, "row 0, column 0 is inf"),
        (ONE_WAY, 2, "it has 3 rows, and the group 2 ranks"),
        ([[0.5, 0.5], [1.0]], 2, "row 1 has 1 entries, and the group 2 ranks"),
        ([], 2, "got none"),
        (IDENTITY, 2, "rank 1 never averages with rank 0"),
        (PAIRS, 4, "apart from rank 0: [2, 3]"),
        ([[0, 1], [1, 0]], 2, "never become equal"),
    ],
    ids=[
        "row", "column", "second", "close", "negative", "nan", "inf", "size", "ragged", "none",
        "identity", "pairs", "swap",
    ],
)  # fmt: skip
def test_other_weights_are_refused(weights: Any, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match="weights") as caught:
        given_topology("ring", weights, ranks)
    assert words in str(caught.value)


@pytest.mark.parametrize("weights", ["ring", 3, [["a", "b"], [0, 1]], [[True, False]] * 2, [0.5]])
def test_what_is_no_matrix_is_refused(weights: Any) -> None:
    with pytest.raises(TypeError, match="weights"):
        given_topology("ring", weights, 2)


def test_matrices_that_connect_together_are_accepted() -> None:
    other = [[0.5, 0, 0, 0.5], [0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5]]
    made = given_topology("ring", [PAIRS, other], 4)
    assert made.contraction() == pytest.approx(0, abs=1e-9)


def test_an_unknown_topology_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'ring', 'shift_one', 'exponential', 'full', got 'star'"):
        named_topology("star", 4)


# Delays.


CASES = {
    **{f"{name} {n}": named_topology(name, n) for name in TOPOLOGIES for n in (2, 3, 4, 8)},
    "partly": given_topology("ring", RING_PARTLY, 4),
    "one way": given_topology("ring", ONE_WAY, 3),
    "unequal": given_topology("ring", UNEQUAL, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_stretch_is_the_smallest_number(name: str) -> None:
    """Compares with many random vectors, and with the norm where matrices are symmetric."""
    made = CASES[name]
    x = torch.randn(made.ranks, 20_000, dtype=torch.float64, generator=seeded(1))
    ratios, norms = [], []
    for matrix in made.matrices:
        difference = torch.eye(made.ranks, dtype=torch.float64) - torch.tensor(
            matrix, dtype=torch.float64
        )
        lx = difference @ x
        along = (x * lx).sum(0)
        ratios.append(float(((lx * lx).sum(0) / along)[along > 1e-6].max()))
        norms.append(float(torch.linalg.matrix_norm(difference, 2)))
        symmetric = torch.equal(difference, difference.T)
        assert max(ratios) <= made.stretch * (1 + 1e-9) <= 2 + 1e-8
        if symmetric:
            assert norms[-1] <= made.stretch * (1 + 1e-9)
    assert max(ratios) >= 0.9 * made.stretch, "a smaller one would do"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def after(made: Topology, bound: int, factor: float, kind: str, steps: int) -> float:
    """What is left of the ranks' differences."""
    rng = random.Random(0)
    start = np.random.default_rng(2).standard_normal((made.ranks, 3))
    delays = {
        "latest": lambda rank, step: bound,
        "random": lambda rank, step: rng.randint(0, bound),
        "by rank": lambda rank, step: bound * (rank % 2),
        "extremes": lambda rank, step: rng.choice([0, bound]),
        "bursts": lambda rank, step: bound if (step + rank) % (2 * bound + 2) > bound else 0,
    }
    gamma = factor * damping(made.stretch, bound)
    ranks = Simulated(made.matrices, start, gamma, delays[kind])
    before = ranks.distance
    for _ in range(steps):
        ranks.step()
    ranks.finish()
    assert np.allclose(ranks.x.mean(0), start.mean(0)), "the mean is kept"
    return ranks.distance / before


KINDS = ["latest", "random", "by rank", "extremes", "bursts"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ring 4", "shift_one 3", "exponential 3", "unequal"])
def test_delayed_rounds_bring_ranks_together(name: str, kind: str) -> None:
    for bound in (1, 4):
        assert after(CASES[name], bound, 1.0, kind, 100 * (bound + 1)) < 1e-3, bound


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_delayed_rounds_bring_all_topologies_together(name: str, kind: str) -> None:
    for bound in (1, 3, 8, 20):
        assert after(CASES[name], bound, 1.0, kind, 150 * (bound + 1)) < 1e-3, bound


@pytest.mark.parametrize("name", ["ring 4", "shift_one 2", "full 3"])
def test_without_damping_they_diverge(name: str) -> None:
    """At 2.1 times the factor, as the limit of constant delays is 2 times or less."""
    for bound in (1, 4):
        assert after(CASES[name], bound, 2.1, "latest", 100 * (bound + 1)) > 10, bound


def test_damping_of_no_delay_is_none() -> None:
    assert damping(4 / 3, 0) == 1.0
    assert damping(4 / 3, 3) == pytest.approx(3 / 16)
    assert damping(0.1, 1) == 1.0
    assert damping(0.0, 5) == 1.0


def test_drawn_delays_are_the_same_everywhere_and_spread() -> None:
    assert [drawn_delay(0, 1, step, 3) for step in range(8)] == [0, 0, 3, 1, 2, 3, 2, 2]
    seen = [drawn_delay(7, rank, step, 4) for rank in range(4) for step in range(500)]
    assert all(350 < seen.count(delay) < 450 for delay in range(5))
    runs = {tuple(drawn_delay(s, r, k, 9) for k in range(9)) for s in (0, 1) for r in (0, 1)}
    assert len(runs) == 4
