"""Clocks and rules, without processes: random joins, leaves and pushes keep what they promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dreamcomm.server.clocks import Clocks
from dreamcomm.server.rules import Averaged, Bounded, Push, Rule, averaged
from dreamcomm.server.weights import Weights
from server.serving import parameters

RANKS = st.integers(0, 4)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "push", "push", "push", "answer", "answer"]), RANKS
    ),
    max_size=60,
)
BOUNDS = st.one_of(st.none(), st.integers(1, 4))


class Workers:
    """What a server's connections do with a rule: each answers a push when the rule allows it."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.here: set[int] = set()
        self.pushed: set[int] = set()  # those that have no answer yet
        self.clock: dict[int, int] = {}  # counted apart from the rule
        self.reads: list[int] = []

    def act(self, what: str, rank: int, push: Push) -> bool:
        """Does it if a worker can; returns whether it has pushed."""
        if what == "join" and rank not in self.here:
            self.here.add(rank)
            self.clock[rank] = min((self.clock[one] for one in self.here - {rank}), default=0)
            self.rule.join(rank)
        elif what == "leave" and rank in self.here:
            self.here.discard(rank)
            self.pushed.discard(rank)
            self.rule.leave(rank)
        elif what == "answer" and rank in self.pushed and self.rule.may_pull(rank):
            self.answer(rank)
        elif what == "push" and rank in self.here - self.pushed:
            self.pushed.add(rank)
            self.clock[rank] += 1
            self.rule.push(rank, push)
            return True
        return False

    def answer(self, rank: int) -> None:
        self.pushed.discard(rank)
        # An update of all counts for each worker, so none is ahead of another.
        synchronous = isinstance(self.rule, Averaged)
        slowest = min(self.clock[one] for one in self.here)
        ahead = 0 if synchronous else self.clock[rank] - slowest
        assert self.rule.clocks.read(rank) == ahead
        self.reads.append(ahead)

    def check_no_deadlock(self) -> None:
        """Some worker computes, or may have its answer; one that waits knows for whom."""
        waiting = {rank for rank in self.pushed if not self.rule.may_pull(rank)}
        assert not self.here or self.here - waiting
        for rank in self.here:
            waits_for = set(self.rule.waits_for(rank))
            assert waits_for <= self.here - waiting - {rank}
            assert bool(waits_for) == (rank in waiting)


def weights_of(*shapes: Sequence[int], lr: float = 1.0) -> Weights:
    tensors = parameters(*shapes)
    return Weights(tensors, torch.optim.SGD(tensors, lr=lr), [""] * len(tensors))


def push_of(weights: Weights, value: float, version: int | None = None) -> Push:
    flats = {
        dtype: torch.full((n,), value, dtype=dtype) for dtype, n in weights.layout.sizes.items()
    }
    return Push(flats, (), weights.version if version is None else version)


@settings(deadline=None)
@given(ACTIONS, BOUNDS)
def test_no_worker_reads_beyond_the_bound(actions: list[Any], bound: int | None) -> None:
    weights = weights_of((2,))
    rule = Bounded(weights, bound)
    workers = Workers(rule)
    pushes = 0
    for what, rank in actions:
        pushes += workers.act(what, rank, push_of(weights, 1.0))
        assert weights.version == pushes, "each push is an update"
        workers.check_no_deadlock()
        if bound is None:
            assert all(rule.may_pull(one) for one in workers.here)
    assert torch.equal(weights.parameters[0], torch.full((2,), -float(pushes)))
    assert sum(rule.clocks.staleness.values()) == len(workers.reads)
    if bound is not None:
        assert max(workers.reads, default=0) <= bound
        assert max(rule.clocks.staleness, default=0) <= bound


@given(st.integers(1, 5))
def test_the_bound_is_reached(bound: int) -> None:
    clocks = Clocks(bound)
    clocks.join(0)
    clocks.join(1)
    reads = []
    for _ in range(bound):
        clocks.tick(1)
        assert clocks.may_read(1)
        reads.append(clocks.read(1))
    clocks.tick(1)
    assert not clocks.may_read(1)
    assert clocks.holding_back(1) == [0]
    assert reads == list(range(1, bound + 1))
    clocks.join(2)
    assert clocks.ahead(2) == 0, "it begins where the slowest is"
    clocks.leave(0)
    assert clocks.holding_back(1) == [2]
    clocks.leave(2)
    assert clocks.may_read(1)


@settings(deadline=None)
@given(ACTIONS, st.integers(1, 3), st.data())
def test_averages_are_of_all_that_are_here(
    actions: list[Any], count: int, data: st.DataObject
) -> None:
    weights = weights_of((1,))
    rule = Averaged(weights, count)
    workers = Workers(rule)
    pending: dict[int, float] = {}
    joined: set[int] = set()
    expected = torch.zeros(1)
    version = 0
    for what, rank in actions:
        # The sum of these depends on their order.
        value = data.draw(st.sampled_from([1e8, 1.0, -1e8, 0.3, 7e-3]))
        if what == "join" and rank not in workers.here:
            pending.pop(rank, None)
        if workers.act(what, rank, push_of(weights, value)):
            pending[rank] = value
        joined |= workers.here
        complete = pending and workers.here <= pending.keys() and len(joined) >= count
        if complete:
            total = torch.zeros(1)
            for place, (_, one) in enumerate(sorted(pending.items())):
                total = torch.tensor([one]) if place == 0 else total + torch.tensor([one])
            expected = expected - total / len(pending)
            version += 1
            pending.clear()
        assert weights.version == version
        assert torch.equal(weights.parameters[0].detach(), expected)
        if len(joined) >= count:
            workers.check_no_deadlock()
        assert rule.missing() == max(count - len(joined), 0)
        assert all(rule.may_pull(one) == (one not in pending) for one in workers.here)
    assert set(rule.lags) <= {0}
    assert set(workers.reads) <= {0}


def test_one_that_skips_is_not_in_the_average() -> None:
    weights = weights_of((1,))
    rule = Averaged(weights, 2)
    rule.join(0)
    rule.join(1)
    rule.skip(1)
    assert not rule.may_pull(1)
    rule.push(0, push_of(weights, 3.0))
    assert rule.may_pull(1)
    assert (weights.version, float(weights.parameters[0].detach())) == (1, -3.0)
    rule.skip(0)
    rule.skip(1)
    assert rule.may_pull(0)
    assert weights.version == 1, "an update without any gradient is none"
    rule.push(0, push_of(weights, 1.0))
    rule.push(1, push_of(weights, 2.0))
    assert (weights.version, float(weights.parameters[0].detach())) == (2, -4.5)


def test_a_worker_that_joins_twice_counts_once() -> None:
    weights = weights_of((1,))
    rule = Averaged(weights, 2)
    for _ in range(2):
        rule.join(0)
        rule.push(0, push_of(weights, 1.0))
        rule.leave(0)
        assert (rule.missing(), weights.version) == (1, 0)
    rule.join(0)
    rule.join(1)
    rule.push(1, push_of(weights, 5.0))
    assert weights.version == 0, "the push of its life before is not used"
    assert rule.waits_for(1) == [0]
    rule.push(0, push_of(weights, 7.0))
    assert (weights.version, float(weights.parameters[0].detach())) == (1, -6.0)


@pytest.mark.parametrize(
    ("damping", "scale", "factors"),
    [
        (None, 1.0, [1.0, 1.0, 1.0]),
        (None, 0.5, [0.5, 0.5, 0.5]),
        (lambda lag: 1.0 / (1 + lag), 1.0, [1.0, 0.5, 0.25]),
        (lambda lag: 0.25**lag, 2.0, [2.0, 0.5, 2 * 0.25**3]),
    ],
    ids=["plain", "scaled", "inverse", "own"],
)
def test_stale_gradients_are_damped(damping: Any, scale: float, factors: list[float]) -> None:
    weights = weights_of((1,))
    rule = Bounded(weights, None, scale, damping)
    rule.join(0)
    moved = []
    for lag, version in ((0, 0), (1, 0), (3, -1)):
        before = weights.parameters[0].detach().clone()
        rule.push(0, push_of(weights, 1.0, version))
        moved.append(float(before - weights.parameters[0].detach()))
        assert rule.lags[lag] == 1
    assert moved == factors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_are_of_32(dtype: torch.dtype) -> None:
    ranks: list[Tensor] = [torch.full((3,), value, dtype=dtype) for value in (256.0, 1.0, 1.0, 1.0)]
    expected = (torch.tensor(259.0) / 4).to(dtype)
    assert torch.equal(averaged(ranks), expected.expand(3))
    assert torch.equal(ranks[0], torch.full((3,), 256.0, dtype=dtype)), "inputs stay"
