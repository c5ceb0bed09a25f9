"""torch.autograd.grad, and graphs that are kept for more than one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.pool import Pool
from zero.units.sharding import my_batch
from zero.units.torch.beside import CLOSE, Beside, loss_of, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def input_gradients() -> tuple[float, list[bool], float]:
    """torch.autograd.grad gives those of an input, and of registered parameters none."""
    beside = Beside.of(stack())
    found = []
    (mine, y), (all_, z) = beside.batches(0)
    for net, x, target in ((beside.net, mine, y), (beside.alone, all_, z)):
        x = x.clone().requires_grad_()
        (one,) = torch.autograd.grad(loss_of(net, x, target), x)
        found.append(one)
    rank, world = dist.get_rank(), dist.get_world_size()
    difference = float((found[0] / world - found[1].chunk(world)[rank]).abs().max())
    without = [one.grad is None for one in beside.net.parameters()]
    return difference, without, beside.run(range(2)).end()


def test_autograd_grad(pool: Pool) -> None:
    for difference, without, worst in pool.run(input_gradients):
        assert difference < CLOSE
        assert without == [True] * 14
        assert worst < CLOSE


def penalty() -> float:
    """The gradient by the input, in the loss: a backward pass through a backward pass."""
    beside = Beside.of(stack())

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = net(x)
        (one,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return nn.functional.mse_loss(out, y) + 0.1 * one.square().mean()

    return beside.run(range(3), loss).end()


def test_autograd_grad_in_a_loss(pool: Pool) -> None:
    assert max(pool.run(penalty)) < CLOSE


def retained() -> float:
    """Two backward passes through one graph, and two losses of one output."""
    beside = Beside.of(stack())
    for step in range(2):
        beside.clear()
        for net, (x, y) in zip((beside.net, beside.alone), beside.batches(step), strict=True):
            out = net(x)
            nn.functional.mse_loss(out, y).backward(retain_graph=True)
            out.abs().mean().backward()
        beside.compare()
        beside.step()
    return beside.end()


def test_retain_graph(pool: Pool) -> None:
    assert max(pool.run(retained, world=3)) < CLOSE


def retained_over_a_step() -> tuple[str, float]:
    """As in one process: a graph holds weights that a step has changed."""
    beside = Beside.of(stack())
    beside.run([0])
    loss = loss_of(beside.net, *my_batch(1))
    loss.backward(retain_graph=True)
    beside.steppers[0].step()
    try:
        loss.backward()
    except RuntimeError as error:
        found = str(error)
    net: Any = beside.net
    net.reset_iter_state()
    for one, other in zip(net.parameters(), beside.alone.parameters(), strict=True):
        value = one.full_tensor()
        with torch.no_grad():
            other.copy_(value)
    fresh = Beside(net, beside.alone)
    return found, fresh.run(range(2, 4)).end()


def test_retain_graph_over_a_step_is_an_error(pool: Pool) -> None:
    for found, worst in pool.run(retained_over_a_step):
        assert "modified by an inplace operation" in found
        assert worst < CLOSE


def evaluated_between(how: str) -> float:
    """The same module runs without gradients between a forward pass and its backward pass, and
    between the backward passes of an accumulation."""
    beside = Beside.of(stack())
    without = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[how]
    net: Any = beside.net
    for step in range(3):
        beside.clear()
        with net.no_sync():
            beside.backward(10 + step)
        for one, (x, y) in zip((beside.net, beside.alone), beside.batches(step), strict=True):
            loss = loss_of(one, x, y)
            with without():
                aim = one(x * 0.5)
            (loss + aim.clone().square().mean()).backward()
        beside.compare()
        beside.step()
    return beside.end()


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_evaluation_between_passes(pool: Pool, how: str) -> None:
    assert max(pool.run(evaluated_between, how)) < CLOSE
