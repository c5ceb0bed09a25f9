"""Counts of a pipeline that are missing, wrong or late: an error on all ranks, and a right step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.buckets.protocol import is_sharded
from dreamcomm.pipeline import PipelineError
from helpers.pool import Pool
from pipeline.pipe_models import make
from pipeline.token_pipes import (
    Way,
    batch,
    close,
    counted,
    made,
    paired,
    step,
    summed,
    window_gradients,
    world_of,
)

pytestmark = pytest.mark.beyond_gloo("checks what only dreamcomm does")

CASE = "uneven"
NAMES = ["alone", "ddp-mean", "ddp-tokens", "zero1-tokens", "zero2-tokens"]


def gradients(way: Way) -> dict[str, Tensor | None]:
    """Without those that are in shards."""
    found = [(name, one.grad) for name, one in way.pipe.named_parameters()]
    return {n: None if g is None or is_sharded(g) else g.clone() for n, g in found}


def refused(way: Way, number: int, *, reduces: bool = True) -> str:
    """The error of a step for which nothing was counted here; gradients are as before."""
    before = gradients(way)
    x, y, weights = batch(CASE, way.share, number)
    with pytest.raises(PipelineError) as caught, nullcontext() if reduces else way.pipe.no_sync():
        way.pipe.step(x, target=(y, weights))
    for name, now in gradients(way).items():
        was = before[name]
        assert (now is None and was is None) or torch.equal(now, was)  # type: ignore[arg-type]
    return str(caught.value)


def check_trains_on(way: Way, numbers: list[int]) -> None:
    """Runs steps, the last of which reduces, and compares what they train with one process."""
    way.optimizer.zero_grad()
    for number in numbers:
        step(way, CASE, number, True, reduces=number == numbers[-1])
    norm = way.pipe.clip_grad_norm_(1e9)
    module = make("mlp", torch.float64)
    expected = window_gradients(module, CASE, numbers, way.shares)
    assert float(norm) == pytest.approx(expected, rel=1e-6)
    way.optimizer.step()
    torch.optim.SGD(module.parameters(), lr=0.05).step()
    weights = dict(module.named_parameters())
    for name, one in way.pipe.named_parameters():
        close(one.detach(), weights[name].detach())


def count_times(way: Way, number: int, times: int) -> None:
    for _ in range(times):
        way.pipe.count(counted(CASE, batch(CASE, way.share, number)[2]))


def without_one(name: str, rank: int, times: int, reduces: bool) -> str:
    """One rank counts not at all, or twice."""
    way = made(name, summed)
    count_times(way, 0, times if dist.get_rank() == rank else 1)
    text = refused(way, 0, reduces=reduces)
    check_trains_on(way, [2, 3])
    return text


@pytest.mark.parametrize("reduces", [True, False], ids=["reduces", "no_sync"])
@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_one_count_a_step(pool: Pool, name: str, times: int, reduces: bool) -> None:
    world = world_of(name)
    rank = world - 1  # it has the last stage
    words = "there is no count" if times == 0 else "called 2 times"
    for text in pool.run(without_one, name, rank, times, reduces, world=world):
        assert f"on rank {rank}" in text
        assert words in text


def not_last(times: int) -> str:
    """What the first stage's rank counts is not needed, though it must be one number."""
    way = made("alone", summed)
    count_times(way, 0, times if dist.get_rank() == 0 else 1)
    x, y, weights = batch(CASE, 0, 0)
    try:
        way.pipe.step(x, target=(y, weights))
    except PipelineError as error:
        return str(error)
    return ""


def test_other_ranks_may_leave_counts_out(pool: Pool) -> None:
    assert pool.run(not_last, 0) == ["", ""]
    for text in pool.run(not_last, 2):
        assert "on rank 0" in text


def of_both() -> str:
    way = made("alone", paired(CASE))
    count_times(way, 0, 1)
    return refused(way, 0)


def test_counts_come_one_way(pool: Pool) -> None:
    for text in pool.run(of_both):
        assert "rank 1: ValueError: the loss function returned counts, and count(n)" in text


# Steps that add to what is divided already.


def twice(name: str) -> str:
    way = made(name, summed)
    step(way, CASE, 0, True, reduces=True)
    count_times(way, 2, 1)
    text = refused(way, 2)
    check_trains_on(way, [2])
    return text


@pytest.mark.parametrize("name", [*NAMES, "zero2-mean"])
def test_means_are_not_added_to(pool: Pool, name: str) -> None:
    for text in pool.run(twice, name, world=world_of(name)):
        sharded = "is sharded already" in text
        assert sharded or "divided by their counts already" in text
        assert "zero_grad(" in text


def cleared(name: str, set_to_none: bool) -> bool:
    """Steps that were cleared count no more; one whose gradients are zeros still does."""
    way = made(name, summed)
    step(way, CASE, 0, True, reduces=False)
    way.optimizer.zero_grad(set_to_none=set_to_none)
    with way.pipe.no_sync():
        x, y, _ = batch(CASE, way.share, 2)
        way.pipe.count(10)
        way.pipe.step(x, target=(y, torch.zeros(len(x), dtype=torch.float64)))
    module, count = make("mlp", torch.float64), 10 * way.shares
    step(way, CASE, 3, True, reduces=True)
    own = window_gradients(module, CASE, [3], way.shares)
    total = sum(float(counted(CASE, batch(CASE, one, 3)[2])) for one in range(way.shares))
    norm = float(way.pipe.clip_grad_norm_(1e9))
    return norm == pytest.approx(own * total / (total + count), rel=1e-6)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_counts_go_with_their_gradients(pool: Pool, name: str, set_to_none: bool) -> None:
    assert all(pool.run(cleared, name, set_to_none, world=world_of(name)))


def after_a_failure(name: str) -> bool:
    """A step that fails within a window counts nothing."""
    way = made(name, summed)
    step(way, CASE, 0, True, reduces=False)
    refused(way, 2)
    step(way, CASE, 3, True, reduces=True)
    expected = window_gradients(make("mlp", torch.float64), CASE, [0, 3], way.shares)
    return float(way.pipe.clip_grad_norm_(1e9)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_step_counts_nothing(pool: Pool, name: str) -> None:
    assert all(pool.run(after_a_failure, name, world=world_of(name)))


# Leaves that are no parameters.


def given_leaf() -> bool:
    """An argument's gradient, which a step under no_sync() has made, is divided with the others."""
    way = made("alone", summed)
    module, total = make("mlp", torch.float64), 0
    leaves, expected = [], []
    for number in (0, 3):
        x, y, weights = batch(CASE, 0, number)
        leaf, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
        summed(module(plain), (y, weights)).backward()
        way.pipe.count(count := int(weights.sum()))
        total += count
        with nullcontext() if number else way.pipe.no_sync():
            way.pipe.step(leaf, target=(y, weights))
        leaves.append(leaf)
        assert plain.grad is not None
        expected.append(plain.grad)
    if dist.get_rank() > 0:
        return True
    for own, one in zip(leaves, expected, strict=True):
        close(own.grad, one / total)
    return True


def test_gradients_of_arguments_are_divided(pool: Pool) -> None:
    assert all(pool.run(given_leaf))


# Numbers.


def bad_number(value: Any, kind: type[Exception]) -> str:
    way = made("alone", summed)
    with pytest.raises(kind) as caught:
        way.pipe.count(value)
    check_trains_on(way, [0, 2])
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (-1, ValueError),
        (-0.5, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (2**62, ValueError),
        (torch.tensor(-3), ValueError),
        (True, TypeError),
        (torch.ones(2), TypeError),
        ("8", TypeError),
    ],
    ids=str,
)
def test_bad_counts(pool: Pool, value: Any, kind: type[Exception]) -> None:
    for rank, text in enumerate(pool.run(bad_number, value, kind)):
        assert f"Pipeline.count() on rank {rank}" in text


def bad_loss(value: Any) -> str:
    way = made("alone", lambda output, target: (summed(output, target), value))
    return refused(way, 0)


@pytest.mark.parametrize("value", [-1, float("nan"), True])
def test_bad_counts_of_the_loss_function(pool: Pool, value: Any) -> None:
    for text in pool.run(bad_loss, value):
        assert "rank 1, stage 1, micro-batch 0" in text
        assert "the loss function's count" in text
