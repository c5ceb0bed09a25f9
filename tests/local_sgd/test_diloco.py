"""DiLoCo: fragments, overlap and the outer optimizer, against workers in one process."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dreamcomm
from dreamcomm.local_sgd import DiLoCo
from dreamcomm.local_sgd.fragments import cut_fragments, due_fragments
from helpers.pool import Pool
from local_sgd import simulated

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm")

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def weights(module: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in module.parameters()]


def trained(steps: int, settings: dict[str, Any]) -> list[Tensor]:
    module = simulated.model()
    optimizer = DiLoCo(module, simulated.sgd(module), NESTEROV, **settings)
    for step in range(1, steps + 1):
        simulated.descend(module, optimizer, step, dist.get_rank())
    return weights(module)


CELLS = [
    (2, 4, 1, 0, 0.0, None),
    (3, 7, 3, 3, 0.0, None),
    (4, 4, 5, 1, 0.5, None),
    (2, 7, 2, 3, 0.0, torch.bfloat16),
]
LONG_CELLS = [
    (world, every, fragments, overlap, alpha, None)
    for world in (2, 3)
    for every in (4, 7)
    for fragments in (1, 2, 3, 6)
    for overlap in (0, 1, 3)
    for alpha in (0.0, 0.5)
]


@pytest.mark.parametrize(
    ("world", "every", "fragments", "overlap", "alpha", "wire"),
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.long) for cell in LONG_CELLS)],
)
def test_equals_workers_in_one_process(
    pool: Pool,
    world: int,
    every: int,
    fragments: int,
    overlap: int,
    alpha: float,
    wire: torch.dtype | None,
) -> None:
    settings = {
        "every": every, "fragments": fragments, "overlap": overlap, "alpha": alpha,
        "wire_dtype": wire,
    }  # fmt: skip
    found = pool.run(trained, 24, settings, world=world)
    runs = cut_fragments([one.nbytes for one in simulated.model().parameters()], fragments)
    expected = simulated.diloco(world, 24, every, runs, overlap, alpha, wire)
    # A pseudo-gradient near the middle of two numbers of bfloat16 may round to either.
    tolerance = 1e-6 if wire is None else 1e-3
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=2 * tolerance)


def against_ddp(steps: int) -> tuple[list[Tensor], list[Tensor]]:
    rank = dist.get_rank()
    apart, together = simulated.model(), simulated.model()
    ours = DiLoCo(
        apart,
        torch.optim.SGD(apart.parameters(), lr=0.1),
        torch.optim.SGD(apart.parameters(), lr=1.0),
        every=1,
    )
    wrapped = dreamcomm.DistributedDataParallel(together)
    theirs = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(steps):
        simulated.descend(apart, ours, step, rank)
        simulated.descend(wrapped, theirs, step, rank)
    return weights(apart), weights(together)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_step_with_outer_rate_1_is_ddp(pool: Pool, world: int) -> None:
    for ours, theirs in pool.run(against_ddp, 20, world=world):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def sent_in_steps(settings: dict[str, Any], steps: int) -> list[int]:
    module = simulated.model()
    optimizer = DiLoCo(module, simulated.sgd(module), NESTEROV, **settings)
    dist.all_reduce(torch.zeros(1))
    sent = []
    for step in range(steps):
        before = dreamcomm.stats()["all_reduce"]["sent"]
        simulated.descend(module, optimizer, step, dist.get_rank())
        sent.append(dreamcomm.stats()["all_reduce"]["sent"] - before)
    return sent


@pytest.mark.parametrize("fragments", [1, 3])
def test_fragments_spread_the_bytes(pool: Pool, fragments: int) -> None:
    sizes = [one.nbytes for one in simulated.model().parameters()]
    runs = cut_fragments(sizes, fragments)
    largest = max(sum(sizes[number] for number in run) for run in runs)
    for sent in pool.run(sent_in_steps, {"every": 6, "fragments": fragments}, 18):
        # Two ranks send each byte once. The mean of a step is S/H, and the most is a fragment.
        assert sum(sent) == pytest.approx(sum(sizes) * 3, rel=0.01)
        assert max(sent) == pytest.approx(largest, rel=0.01)


def test_a_wire_dtype_halves_the_bytes(pool: Pool) -> None:
    settings = {"every": 2, "wire_dtype": torch.bfloat16}
    nbytes = sum(one.nbytes for one in simulated.model().parameters())
    for sent in pool.run(sent_in_steps, settings, 2):
        assert sent == [0, nbytes // 2]


def resumed(settings: dict[str, Any], at: int) -> tuple[bool, int]:
    """Saved inside a round, with means under way, and gone on with in another object."""
    rank = dist.get_rank()
    module = simulated.model()
    optimizer = DiLoCo(module, simulated.sgd(module), NESTEROV, **settings)
    for step in range(at):
        simulated.descend(module, optimizer, step, rank)
    own = {name: one.clone() for name, one in module.state_dict().items()}
    state = deepcopy(optimizer.state_dict())  # as a file would be
    under_way = len(state["diloco"]["flights"])
    other = simulated.model(seed=9)
    again = DiLoCo(other, simulated.sgd(other), NESTEROV, **settings)
    other.load_state_dict(own)
    again.load_state_dict(state)
    for step in range(at, at + 17):
        simulated.descend(module, optimizer, step, rank)
        simulated.descend(other, again, step, rank)
    return all(map(torch.equal, weights(module), weights(other))), under_way


def test_resumes_inside_a_round(pool: Pool) -> None:
    settings = {"every": 6, "fragments": 3, "overlap": 3}
    assert pool.run(resumed, settings, 10) == [(True, 2)] * 2


def synchronized() -> tuple[bool, bool, bool]:
    """What ranks have in common, and that two runs have the same bits."""
    results = []
    for _ in range(2):
        module = simulated.model()
        optimizer = DiLoCo(module, simulated.sgd(module), NESTEROV, every=5, fragments=2, overlap=2)
        for step in range(12):
            simulated.descend(module, optimizer, step, dist.get_rank())
        apart = equal_on_all(module)
        optimizer.synchronize()
        results.append(weights(module))
    return apart, equal_on_all(module), all(map(torch.equal, *results))


def equal_on_all(module: nn.Module) -> bool:
    flat = torch.cat([one.detach().reshape(-1) for one in module.parameters()])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(one, every[0]) for one in every)


def test_synchronize_makes_ranks_equal(pool: Pool) -> None:
    assert pool.run(synchronized, world=3) == [(False, True, True)] * 3


def settled() -> tuple[bool, bool]:
    """At a round's end, and twice, there is nothing new: no momentum moves the weights."""
    module = simulated.model()
    optimizer = DiLoCo(module, simulated.sgd(module), NESTEROV, every=3)
    found = []
    for steps in (3, 2):
        for step in range(steps):
            simulated.descend(module, optimizer, step, dist.get_rank())
        if steps == 2:
            optimizer.synchronize()
        before = weights(module)
        optimizer.synchronize()
        found.append(all(map(torch.equal, before, weights(module))))
    return found[0], found[1]


def test_synchronize_without_news_changes_nothing(pool: Pool) -> None:
    assert pool.run(settled) == [(True, True)] * 2


def refused(kind: str) -> str:
    module = simulated.model()
    inner: Any = simulated.sgd(module)
    outer: Any = NESTEROV
    settings: dict[str, Any] = {"every": 4}
    if kind == "overlap":
        settings["overlap"] = 4
    elif kind == "fragments":
        settings["fragments"] = 7
    elif kind == "alpha":
        settings["alpha"] = 1.0
    elif kind == "wire":
        settings["wire_dtype"] = torch.int64
    elif kind == "outer":
        outer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    elif kind == "differs":
        settings["overlap"] = dist.get_rank()
    elif kind == "makes":
        outer = len
    try:
        DiLoCo(module, inner, outer, **settings)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("overlap", "overlap below every"),
        ("fragments", "at most a fragment for each of 6 parameters, got 7"),
        ("alpha", "alpha from 0 to below 1, got 1.0"),
        ("wire", "wire_dtype"),
        ("outer", "other parameters than the inner one"),
        ("differs", "rank 1 has overlap=1, and rank 0 has overlap=0"),
        ("makes", "outer to make an optimizer, got a int"),
    ],
)
def test_bad_input_is_refused_on_all_ranks(pool: Pool, kind: str, words: str) -> None:
    for text in pool.run(refused, kind):
        assert words in text


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.data())
def test_fragments_are_runs(sizes: list[int], data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, len(sizes)))
    runs = cut_fragments(sizes, fragments)
    assert len(runs) == fragments
    assert all(runs)
    assert list(chain(*runs)) == list(range(len(sizes)))


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 50))
def test_each_fragment_is_due_once_a_round(every: int, fragments: int, first: int) -> None:
    due = [
        f for t in range(first + 1, first + 1 + every) for f in due_fragments(t, every, fragments)
    ]
    assert sorted(due) == list(range(fragments))


def test_the_schedule_of_the_picture() -> None:
    steps = {f: [t for t in range(1, 13) if f in due_fragments(t, 6, 3)] for f in range(3)}
    assert steps == {0: [2, 8], 1: [4, 10], 2: [6, 12]}
