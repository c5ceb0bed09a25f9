"""What sums of gradients are divided by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers.pool import Pool
from zero.units.sharding import whole
from zero.units.torch.beside import CLOSE, Beside, loss_of, mean, shard_all, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def divided(factor: float) -> list[bool]:
    """Sums of gradients are divided by a factor in place of the number of ranks."""
    net, other = shard_all(stack()), shard_all(stack())
    net[0].set_gradient_divide_factor(factor)
    for one in (net, other):
        loss_of(one, *Beside(one, stack()).batches(0)[0]).backward()
    found = []
    world = float(torch.distributed.get_world_size())
    for (name, one), two in zip(net.named_parameters(), other.parameters(), strict=True):
        expected = two.grad.full_tensor() * (world / factor if name.startswith("0.") else 1.0)
        found.append(torch.allclose(one.grad.full_tensor(), expected, rtol=1e-6, atol=0))
    return found


@pytest.mark.parametrize("factor", [1.0, 5.0])
def test_set_gradient_divide_factor(pool: Pool, factor: float) -> None:
    for found in pool.run(divided, factor, world=3):
        assert found == [True] * 14


def summed() -> tuple[float, float]:
    """A factor of 1 for all units: the gradients of a loss that is summed over the batch."""

    def shard(net: Any) -> Any:
        for one in shard_all(net).modules():
            if hasattr(one, "set_gradient_divide_factor"):
                one.set_gradient_divide_factor(1.0)
        return net

    beside = Beside.of(stack(), shard, lr=1e-3)
    for step in range(3):
        beside.clear()
        ours = []
        for net, (x, y) in zip((beside.net, beside.alone), beside.batches(step), strict=True):
            loss = nn.functional.mse_loss(net(x), y, reduction="sum")
            loss.backward()
            ours.append(loss)
        beside.compare()
        beside.step()
    difference = abs(mean(ours[0]) * torch.distributed.get_world_size() - float(ours[1]))
    return beside.end(), difference


def test_gradients_of_sums(pool: Pool) -> None:
    for worst, difference in pool.run(summed):
        assert worst < 2e-5
        assert difference < 1e-4


def between(held_back: bool) -> float:
    """A factor that is set between two micro-batches counts for what is reduced from then on."""
    net, alone = shard_all(stack()), [shard_all(stack()) for _ in range(2)]
    batches = [Beside(net, stack()).batches(number)[0] for number in range(2)]
    for one, data in zip(alone, batches, strict=True):
        loss_of(one, *data).backward()
    net.set_requires_gradient_sync(not held_back)
    loss_of(net, *batches[0]).backward()
    for one in (net, *net.children()):
        one.set_gradient_divide_factor(0.5)
    net.set_requires_gradient_sync(True)
    loss_of(net, *batches[1]).backward()
    factor = torch.distributed.get_world_size() / 0.5
    worst = 0.0
    for ours, first, second in zip(*(one.parameters() for one in (net, *alone)), strict=True):
        expected = whole(first.grad) * (factor if held_back else 1) + whole(second.grad) * factor
        worst = max(worst, float((whole(ours.grad) - expected).abs().max()))
    return worst


@pytest.mark.parametrize("held_back", [True, False])
def test_set_gradient_divide_factor_within_an_accumulation(pool: Pool, held_back: bool) -> None:
    assert max(pool.run(between, held_back, world=3)) < 3 * CLOSE
