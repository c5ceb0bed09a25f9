"""DiLoCo: fragments, overlap and the outer optimizer, against workers in one process."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dreamcomm
from dreamcomm.local_sgd import DiLoCo
from dreamcomm.local_sgd.fragments import cut_fragments, due_fragments
from helpers.pool import Pool
from local_sgd import simulated
from local_sgd.simulated import weights

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm")

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


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
    (3, 4, 2, 1, 0.0, torch.float16),
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
    # A pseudo-gradient near the middle of two numbers of 16 bits may round to either.
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


def on_gloo(wire: torch.dtype | None) -> tuple[list[Tensor], list[Tensor]]:
    """The same over a group that cannot average."""
    found = []
    for group in (None, dist.new_group(backend="gloo")):
        module = simulated.model()
        settings: dict[str, Any] = {"every": 3, "fragments": 2, "overlap": 1, "wire_dtype": wire}
        optimizer = DiLoCo(module, simulated.sgd(module), NESTEROV, group=group, **settings)
        for step in range(9):
            simulated.descend(module, optimizer, step, dist.get_rank())
        found.append(weights(module))
    return found[0], found[1]


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_other_backends_average_too(pool: Pool, wire: torch.dtype | None) -> None:
    tolerance = 1e-6 if wire is None else 1e-2
    for ours, theirs in pool.run(on_gloo, wire):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def statistics(buffers: str) -> tuple[list[float], list[float]]:
    """Those in the middle of a round, and those after its last fragment."""
    module, rank = simulated.Normed(), dist.get_rank()
    settings: dict[str, Any] = {"every": 4, "fragments": 2, "overlap": 1, "buffers": buffers}
    optimizer = DiLoCo(module, simulated.sgd(module), NESTEROV, **settings)
    found = []
    for step in range(4):
        simulated.descend(module, optimizer, step, rank)
        mean = module.norm.running_mean
        assert mean is not None
        found.append(mean.tolist())
    return found[2], found[3]


def test_statistics_are_averaged_with_the_last_fragment(pool: Pool) -> None:
    (middle, end), (other_middle, other_end) = pool.run(statistics, "average")
    assert middle != other_middle
    assert end == other_end
    (_, end), (_, other_end) = pool.run(statistics, "local")
    assert end != other_end


def twice_made() -> tuple[list[Tensor], list[Tensor]]:
    """With a function that makes the outer optimizer, and with one of the model's parameters."""
    found = []
    for given_one in (False, True):
        module = simulated.model()
        outer = NESTEROV(module.parameters()) if given_one else NESTEROV
        optimizer = DiLoCo(module, simulated.sgd(module), outer, every=2)
        for step in range(8):
            simulated.descend(module, optimizer, step, dist.get_rank())
        found.append(weights(module))
    return found[0], found[1]


def test_outer_optimizers_of_both_kinds_have_the_same_bits(pool: Pool) -> None:
    for made, given_one in pool.run(twice_made):
        assert all(map(torch.equal, made, given_one))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.data())
def test_fragments_are_runs_of_about_equal_bytes(sizes: list[int], data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, len(sizes)))
    runs = cut_fragments(sizes, fragments)
    assert len(runs) == fragments
    assert all(runs)
    assert list(chain(*runs)) == list(range(len(sizes)))
    largest = max(sum(sizes[number] for number in run) for run in runs)
    assert largest <= sum(sizes) / fragments + max(sizes)


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 50))
def test_each_fragment_is_due_once_a_round(every: int, fragments: int, first: int) -> None:
    due = [
        f for t in range(first + 1, first + 1 + every) for f in due_fragments(t, every, fragments)
    ]
    assert sorted(due) == list(range(fragments))


def test_the_schedule_of_the_picture() -> None:
    steps = {f: [t for t in range(1, 13) if f in due_fragments(t, 6, 3)] for f in range(3)}
    assert steps == {0: [2, 8], 1: [4, 10], 2: [6, 12]}
