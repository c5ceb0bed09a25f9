"""Gradients of several micro-batches, with each of torch's ways to hold their reduction back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from zero.units.sharding import my_batch
from zero.units.torch.beside import (
    CLOSE,
    Beside,
    Mlp,
    kinds,
    layers,
    loss_of,
    shard_all,
    stack,
)

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
MICRO = 3


def accumulated(reshard: bool | None, reshard_backward: bool, how: str) -> tuple[float, list[int]]:
    """Three micro-batches a step; then how often ranks met in each step."""
    beside = Beside.of(stack(), lambda net: shard_all(net, reshard_after_forward=reshard))
    net: Any = beside.net
    net.set_reshard_after_backward(reshard_backward)
    met = []
    for step in range(3):
        beside.clear()
        before = net._unit.tree.window.barriers
        for micro in range(MICRO):
            run_micro(beside, step * MICRO + micro, micro == MICRO - 1, how)
        met.append(net._unit.tree.window.barriers - before)
        beside.compare()
        beside.step()
    return beside.end(), met


def run_micro(beside: Beside, number: int, is_last: bool, how: str) -> None:
    net: Any = beside.net
    if how in ("both", "last only"):
        net.set_is_last_backward(is_last)
    if how in ("both", "sync only"):
        net.set_requires_gradient_sync(is_last)
    if how == "no_sync" and not is_last:
        with net.no_sync():
            beside.backward(number, scale=1 / MICRO)
    else:
        beside.backward(number, scale=1 / MICRO)


@pytest.mark.parametrize("how", ["both", "sync only", "last only", "no_sync", "plain"])
@pytest.mark.parametrize(("reshard", "reshard_backward"), [(None, True), (False, False)])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_gradient_accumulation(
    pool: Pool, reshard: bool | None, reshard_backward: bool, how: str, world: int
) -> None:
    for worst, met in pool.run(accumulated, reshard, reshard_backward, how, world=world):
        assert worst < CLOSE
        assert met == [2 * MICRO if how == "plain" else 2] * 3


def one_unit_unsynced() -> tuple[str, float]:
    """Torch lets some units hold gradients back; here all units of a root have one setting."""
    beside = Beside.of(stack())
    layers(beside.net)[0].set_requires_gradient_sync(False)
    try:
        loss_of(beside.net, *my_batch(0)).backward()
    except NotImplementedError as error:
        found = str(error)
    net: Any = beside.net
    net.reset_iter_state()
    net.set_requires_gradient_sync(True)
    return found, beside.run(range(2)).end()


def test_gradient_accumulation_of_some_units_is_refused(pool: Pool) -> None:
    for found, worst in pool.run(one_unit_unsynced):
        assert "expected one setting of set_requires_gradient_sync()" in found
        assert worst < CLOSE


def interleaved(use_root: bool) -> float:
    """Warm-up forwards, then forward and backward in turn, then the backwards that are left."""
    torch.manual_seed(9)
    beside = Beside.of(nn.Sequential(Mlp(12), Mlp(12), nn.Linear(12, 5)))
    net: Any = beside.net
    sides = [(beside.net, 0), (beside.alone, 1)]
    for step in range(2):
        beside.clear()
        waiting: list[list[torch.Tensor]] = []
        for number in range(6):
            if number < 4:
                batches = beside.batches(step * 4 + number)
                waiting.append([run(one, *batches[of], use_root) / 4 for one, of in sides])
            if number >= 2:
                done = number - 2
                net.set_is_last_backward(done == 3)
                net.set_requires_gradient_sync(done == 3)
                for loss in waiting[done]:
                    loss.backward()
        beside.compare()
        beside.step()
    return beside.end()


def run(net: nn.Module, x: torch.Tensor, y: torch.Tensor, use_root: bool) -> torch.Tensor:
    if use_root:
        return loss_of(net, x, y)
    for one in layers(net):
        x = one(x)
    return nn.functional.mse_loss(x, y)


@pytest.mark.parametrize("use_root", [True, False])
def test_1f1b_microbatching(pool: Pool, use_root: bool) -> None:
    assert max(pool.run(interleaved, use_root)) < CLOSE


def cleared_between(set_to_none: bool, how: str) -> float:
    """What was accumulated is dropped before the last micro-batch."""
    beside = Beside.of(stack())
    net: Any = beside.net
    if how == "ZeroOptimizer":
        beside.steppers[0] = ZeroOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    clearing = [net, beside.alone] if how == "module" else beside.steppers
    for step in range(3):
        with net.no_sync():
            beside.backward(10 + step)
        for one in clearing:
            one.zero_grad(set_to_none=set_to_none)
        beside.backward(step)
        beside.compare()
        beside.step()
        beside.clear(set_to_none)
    return beside.end()


@pytest.mark.parametrize(
    ("set_to_none", "how"),
    [(True, "torch's optimizer"), (True, "module"), (False, "module"), (False, "ZeroOptimizer")],
)
def test_gradient_accumulation_cleared_between(pool: Pool, set_to_none: bool, how: str) -> None:
    assert max(pool.run(cleared_between, set_to_none, how)) < CLOSE


def reduced_by(what: str) -> tuple[float, set[bool]]:
    """All micro-batches are held back, until the module's method or an optimizer's step."""
    beside = Beside.of(stack())
    net: Any = beside.net
    if what == "ZeroOptimizer":
        beside.steppers[0] = ZeroOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(3):
        beside.clear()
        with net.no_sync():
            for micro in range(MICRO):
                beside.backward(step * MICRO + micro, scale=1 / MICRO)
        if what == "reduce_gradients":
            net.reduce_gradients()
            beside.compare()
        beside.step()
    return beside.end(), set(kinds(net).values())


@pytest.mark.parametrize("what", ["reduce_gradients", "ZeroOptimizer", "torch's optimizer"])
def test_gradient_accumulation_reduced_at_the_end(pool: Pool, what: str) -> None:
    for worst, registered in pool.run(reduced_by, what, world=3):
        assert worst < CLOSE
        assert registered == {True}
