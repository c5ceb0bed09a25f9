"""Gossip keeps the mean, brings ranks together, and trains as workers in one process do."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dreamcomm
from dreamcomm.gossip import Gossip
from gossip.gossiping import (
    PARTLY,
    UNEQUAL,
    Apart,
    Pauses,
    everyone,
    made,
    simulated,
    train,
)
from gossip.simulated import distance
from helpers.pool import Pool

# As in one process.

WAYS: dict[str, dict[str, Any]] = {
    "ring": {"topology": "ring"},
    "late ring": {"topology": "ring", "bound": 3},
    "late pairs": {"topology": "shift_one", "bound": 1, "seed": 5},
    "exponential": {"topology": "exponential"},
}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_workers_in_one_process(pool: Pool, way: str, world: int) -> None:
    found = pool.run(train, 20, None, WAYS[way], world=world)
    expected = simulated(world, 20, WAYS[way])
    for rank, (before, after) in enumerate(found):
        assert np.abs(before - expected[0][rank]).max() < 1e-6
        assert np.abs(after - expected[1][rank]).max() < 1e-6


@pytest.mark.parametrize(("weights", "world"), [(PARTLY, 4), ([UNEQUAL, np.eye(3)], 3)])
def test_it_trains_with_given_weights(pool: Pool, weights: Any, world: int) -> None:
    options = {"weights": weights, "bound": 2, "seed": 3}
    found = pool.run(train, 20, None, options, world=world)
    expected = simulated(world, 20, options)
    for rank, (before, after) in enumerate(found):
        assert np.abs(before - expected[0][rank]).max() < 1e-6
        assert np.abs(after - expected[1][rank]).max() < 1e-6


# The mean.


def mean_error(
    steps: int, dtype: torch.dtype, pull: float, options: dict[str, Any], pauses: int | None
) -> float:
    """How far the mean is from that of the start and of the local steps."""
    apart, pause = Apart(options, dtype, pull=pull), Pauses(pauses)
    for _ in range(steps):
        pause()
        apart.gossip.step()
    apart.gossip.finish()
    found = np.stack(everyone(apart()))
    ranks, numel = found.shape
    expected = [made(rank, numel, 0) - pull * steps * made(rank, numel, 1) for rank in range(ranks)]
    return float(np.abs(found.mean(0) - np.mean(expected, 0)).max())


@pytest.mark.parametrize("seed", [0, None], ids=["seeded", "as they arrive"])
@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("topology", ["ring", "shift_one"])
def test_the_mean_is_kept(pool: Pool, topology: str, bound: int, seed: int | None) -> None:
    options = {"topology": topology, "bound": bound, "seed": seed}
    pauses = 1 if bound else None
    assert max(pool.run(mean_error, 50, torch.float32, 0.0, options, pauses, world=3)) < 1e-6
    assert max(pool.run(mean_error, 50, torch.float64, 0.01, options, pauses, world=3)) < 1e-13


@pytest.mark.long
@pytest.mark.parametrize("bound", [0, 3])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("topology", ["ring", "shift_one", "exponential", "full"])
def test_the_mean_is_kept_by_all_topologies(
    pool: Pool, topology: str, world: int, bound: int
) -> None:
    for seed in (0, 1, None):
        options = {"topology": topology, "bound": bound, "seed": seed}
        for dtype, pull, most in ((torch.float32, 0.0, 1e-6), (torch.float64, 0.01, 1e-13)):
            found = pool.run(mean_error, 50, dtype, pull, options, 2, world=world)
            assert max(found) < most


def long_run(steps: int) -> float:
    """How far equal parameters move."""
    apart = Apart({"topology": "ring"})
    apart.gossip.average_now()
    before = apart()
    for _ in range(steps):
        apart.gossip.step()
    return float(np.abs(apart() - before).max())


def test_equal_parameters_do_not_drift(pool: Pool) -> None:
    """Although three times 1/3 is more than 1 in float32."""
    assert pool.run(long_run, 200, world=3) == [0.0] * 3


# Coming together.


def distances(steps: int, options: dict[str, Any]) -> list[float]:
    """How far all ranks are from their mean: before, and after each step."""
    apart = Apart(options, torch.float64, numel=50)
    found = [distance(np.stack(everyone(apart())))]
    for _ in range(steps):
        apart.gossip.step()
        found.append(distance(np.stack(everyone(apart()))))
    return found


def second_eigenvalue(weights: Any) -> float:
    return float(sorted(np.abs(np.linalg.eigvals(np.array(weights))))[-2])


def ring(world: int) -> Any:
    near = [
        [min((i - j) % world, (j - i) % world) <= 1 for j in range(world)] for i in range(world)
    ]
    return np.array(near) / np.sum(near, 1)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"topology": "ring"}, ring(2)),
        ({"topology": "ring"}, ring(3)),
        ({"topology": "ring"}, ring(4)),
        ({"weights": PARTLY}, PARTLY),
        ({"weights": UNEQUAL}, UNEQUAL),
        ({"topology": "full"}, np.full((4, 4), 0.25)),
    ],
    ids=["ring 2", "ring 3", "ring 4", "partly", "unequal", "full"],
)
def test_ranks_come_together_by_the_second_eigenvalue(
    pool: Pool, options: dict[str, Any], weights: Any
) -> None:
    factor = second_eigenvalue(weights)
    for found in pool.run(distances, 20, options, world=len(weights)):
        for number, one in enumerate(found[1:], 1):
            assert one <= 1.05 * factor**number * found[0] + 1e-13, number


def test_pairs_are_all_equal_after_a_period(pool: Pool) -> None:
    """Four ranks: in the first round 0-2 and 1-3, in the second 0-3 and 1-2."""
    for start, first, second in pool.run(distances, 2, {"topology": "shift_one"}, world=4):
        assert 0.1 * start < first < start
        assert second < 1e-14


def test_late_rounds_bring_ranks_together(pool: Pool) -> None:
    for bound in (1, 3):
        options = {"topology": "ring", "bound": bound, "seed": 0}
        for found in pool.run(distances, 60, options, world=3):
            assert found[-1] < 1e-2 * found[0]


# Replays.


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_seeded_run_has_the_same_bits_again(pool: Pool, bound: int) -> None:
    options = {"topology": "ring", "bound": bound, "seed": 4}
    first, second = (pool.run(train, 15, pauses, options, world=3) for pauses in (1, 2))
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])
    if bound:
        other = pool.run(train, 15, None, options | {"seed": 5}, world=3)
        assert not np.array_equal(first[0][0], other[0][0]), "the seed draws the delays"


@pytest.mark.long
@pytest.mark.parametrize("topology", ["ring", "shift_one", "exponential"])
@pytest.mark.parametrize("bound", [1, 3])
def test_many_seeded_runs_have_the_same_bits(pool: Pool, bound: int, topology: str) -> None:
    options = {"topology": topology, "bound": bound}
    runs = [pool.run(train, 40, pauses, options, world=4) for pauses in range(6)]
    for run in runs[1:]:
        for one, other in zip(runs[0], run, strict=True):
            assert np.array_equal(one[0], other[0])


# A slow rank.


def with_slow(steps: int, pause: float, options: dict[str, Any]) -> tuple[Any, float, float]:
    """The report before finish(), the mean's error, and how far ranks are apart at the end."""
    apart, rank = Apart(options), dist.get_rank()
    for _ in range(steps):
        time.sleep(pause * (5 if rank == 1 else 1))
        apart.gossip.step()
    before = apart.gossip.report()
    apart.gossip.finish()
    after = apart.gossip.report()
    assert after.outstanding == 0
    assert after.rounds == sum(after.delays.values()) == steps
    found = np.stack(everyone(apart()))
    expected = np.mean([made(one, found.shape[1], 0) for one in range(len(found))], 0)
    return before, float(np.abs(found.mean(0) - expected).max()), distance(found)


@pytest.mark.beyond_gloo("sees what has arrived")
@pytest.mark.parametrize("bound", [1, 3])
def test_a_slow_rank_is_late_by_at_most_the_bound(pool: Pool, bound: int) -> None:
    options = {"bound": bound, "seed": None}
    found = pool.run(with_slow, 60, 0.001, options, world=3)
    start = distance(np.stack([made(rank, 3000, 0) for rank in range(3)]))
    for rank, (report, error, apart) in enumerate(found):
        assert max(report.delays) <= bound
        assert report.outstanding <= bound
        assert error < 1e-6
        assert apart < 1e-2 * start
        if rank != 1:
            assert max(report.delays) == bound, "quick ranks run ahead as far as they may"
            assert report.waited > 0


# At the end.


def averaged(options: dict[str, Any]) -> tuple[Any, Any, int]:
    apart = Apart(options)
    for _ in range(5):
        apart.gossip.step()
    apart.gossip.average_now()
    middle = apart()
    apart.gossip.step()
    apart.gossip.average_now()
    return middle, apart(), apart.gossip.steps


@pytest.mark.parametrize("bound", [0, 2])
def test_average_now_makes_all_ranks_equal(pool: Pool, bound: int) -> None:
    found = pool.run(averaged, {"bound": bound}, world=3)
    expected = np.mean([made(rank, 3000, 0) for rank in range(3)], 0)
    for middle, end, steps in found:
        assert np.array_equal(middle, found[0][0])
        assert np.abs(middle - expected).max() < 1e-6
        assert np.abs(end - expected).max() < 1e-6
        assert steps == 6


def counted(options: dict[str, Any]) -> Any:
    apart = Apart(options)
    for _ in range(10):
        apart.gossip.step()
    apart.gossip.finish()
    return apart.gossip.report()


def test_the_report_counts_bytes_and_rounds(pool: Pool) -> None:
    for world, peers in ((2, 1), (3, 2), (4, 2)):
        for report in pool.run(counted, {"topology": "ring", "bound": 1}, world=world):
            bytes_ = 10 * peers * 3000 * 4
            assert bytes_ <= report.sent_bytes <= 1.2 * bytes_
            assert report.rounds == report.steps == 10
            assert set(report.delays) <= {0, 1}
            assert "10 rounds applied in 10 steps" in str(report)


def test_one_rank_alone_trains_as_its_optimizer_does(pool: Pool) -> None:
    for bound in (0, 2):
        options = {"bound": bound}
        ((before, after),) = pool.run(train, 20, None, options, world=1)
        assert np.abs(before - simulated(1, 20, options)[0][0]).max() < 1e-6
        assert np.array_equal(before, after)


# Handwritten digits.

TESTED, ROWS = 360, 16


def classified(options: dict[str, Any] | None, seeds: range, steps: int) -> float:
    """The mean accuracy of training with gossip, or without options with averaged gradients."""
    from sklearn.datasets import load_digits  # takes a second

    found = load_digits()
    images = torch.from_numpy(found.data).float() / 8 - 1
    digits = torch.from_numpy(found.target)
    rank, world, accuracies = dist.get_rank(), dist.get_world_size(), []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(digits), generator=generator)
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        trained = module if options is not None else dreamcomm.DistributedDataParallel(module)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        if options is not None:
            optimizer = Gossip(module, optimizer, **options)
        for _ in range(steps):
            drawn = torch.randint(TESTED, len(order), (world, ROWS), generator=generator)
            rows = order[drawn[rank]]
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(images[rows]), digits[rows]).backward()
            optimizer.step()
        if isinstance(optimizer, Gossip):
            optimizer.average_now()
        rows = order[:TESTED]
        right = module(images[rows]).argmax(1) == digits[rows]
        accuracies.append(float(right.float().mean()))
    return float(np.mean(accuracies))


@pytest.mark.long
@pytest.mark.beyond_gloo("compares with dreamcomm's DistributedDataParallel")
def test_digits_are_learnt_as_well_as_with_averaged_gradients(pool: Pool) -> None:
    pytest.importorskip("sklearn")
    ways: list[dict[str, Any]] = [
        {"topology": "ring"},
        {"topology": "shift_one"},
        {"topology": "exponential"},
        {"topology": "ring", "bound": 3},
        {"topology": "ring", "bound": 3, "seed": None},
    ]
    expected = pool.run(classified, None, range(3), 300, world=4, timeout=200)[0]
    assert expected > 0.9
    found = {
        str(way): pool.run(classified, way, range(3), 300, world=4, timeout=200) for way in ways
    }
    print(f"DistributedDataParallel {expected:.4f}", *(f"{k} {v[0]:.4f}" for k, v in found.items()))
    for way, accuracies in found.items():
        assert min(accuracies) > expected - 0.01, way
