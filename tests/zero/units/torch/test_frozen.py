"""Frozen parameters: beside trained ones in a unit, in units of their own, and by turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, Mlp, layers, loss_of, shard_all, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
RESHARD = pytest.mark.parametrize("reshard", [True, False])
Found = tuple[float, list[str]]


def with_gradient(net: nn.Module) -> list[str]:
    return [name for name, one in net.named_parameters() if one.grad is not None]


def per_group(reshard: bool, checkpoints: bool, freeze: str) -> Found:
    """In each unit biases are frozen, or weights."""
    net = stack()
    for name, one in net.named_parameters():
        one.requires_grad_(not name.endswith(freeze))
    beside = Beside.of(net, lambda one: shard_all(one, reshard_after_forward=reshard))
    worst = beside.run(range(4), recomputed if checkpoints else loss_of).end()
    return worst, with_gradient(beside.net)


def recomputed(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    for one in layers(net):
        x = checkpoint(one, x, use_reentrant=False)
    return nn.functional.mse_loss(x, y)


@RESHARD
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("freeze", ["bias", "weight"])
def test_train_mixed_requires_grad_per_group(
    pool: Pool, reshard: bool, checkpoints: bool, freeze: str
) -> None:
    for worst, names in pool.run(per_group, reshard, checkpoints, freeze):
        assert worst < CLOSE
        assert len(names) == 7
        assert not any(name.endswith(freeze) for name in names)


def across_groups(reshard: bool, frozen: list[int]) -> Found:
    """Whole units are frozen; in the second half of the steps others are."""
    net = stack()

    def freeze(one: nn.Module, numbers: list[int]) -> None:
        for number, layer in enumerate(layers(one)):
            layer.requires_grad_(number not in numbers)

    freeze(net, frozen)
    beside = Beside.of(net, lambda one: shard_all(one, reshard_after_forward=reshard))
    beside.run(range(3))
    for one in (beside.net, beside.alone):
        freeze(one, [1])
    return beside.run(range(3, 6)).end(), with_gradient(beside.net)


@RESHARD
@pytest.mark.parametrize("frozen", [[0], [0, 2], [3], []])
def test_train_mixed_requires_grad_across_groups(
    pool: Pool, reshard: bool, frozen: list[int]
) -> None:
    for worst, names in pool.run(across_groups, reshard, frozen):
        assert worst < CLOSE
        assert {name[0] for name in names} == {"0", "2", "3"}


class Several(nn.Module):
    """A frozen child that is used twice, and a trained one between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.frozen, self.trained = Mlp(12), Mlp(12)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.frozen(self.trained(self.frozen(x))))
        return out


def several(reshard: bool) -> Found:
    beside = Beside.of(Several(), lambda net: shard_all(net, reshard_after_forward=reshard))

    def twice(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(net, x, y) + loss_of(net, x * 0.5, y)

    return beside.run(range(2)).run(range(2, 4), twice).end(), with_gradient(beside.net)


@RESHARD
def test_multi_forward_mixed_requires_grad(pool: Pool, reshard: bool) -> None:
    for worst, names in pool.run(several, reshard, world=3):
        assert worst < CLOSE
        assert {name.split(".")[0] for name in names} == {"trained", "head"}


def toggled() -> float:
    """Parameters are frozen and thawed between steps, also within an accumulation."""
    beside = Beside.of(stack())
    net: Any = beside.net
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        for ours, alone in zip(net.parameters(), beside.alone.parameters(), strict=True):
            trains = bool(torch.rand((), generator=generator) < 0.6)
            ours.requires_grad_(trains)
            alone.requires_grad_(trains)
        if step % 2:
            beside.clear()
        beside.backward(step)
        beside.compare()
        beside.step()
    return beside.end()


@pytest.mark.parametrize("world", [2, 3])
def test_requires_grad_toggled_between_steps(pool: Pool, world: int) -> None:
    assert max(pool.run(toggled, world=world)) < CLOSE


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it, as LoRA has."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.up(self.down(x))
        return out


def adapted() -> tuple[float, list[str], bool]:
    """Ranks beyond the second have no rows of some weights; frozen ones keep their bits."""
    torch.manual_seed(11)
    net = nn.Sequential(Adapted(nn.Linear(12, 12)), nn.Tanh(), Adapted(nn.Linear(12, 5)))
    before = [one.detach().clone() for one in net.parameters() if not one.requires_grad]

    def shard(one: Any) -> Any:
        fully_shard(one[0])
        return fully_shard(one)

    beside = Beside.of(net, shard)
    worst = beside.run(range(4)).end()
    after = [one.full_tensor() for one in net.parameters() if not one.requires_grad]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return worst, with_gradient(net), same


def test_train_low_rank_adapters(pool: Pool) -> None:
    for worst, names, same in pool.run(adapted, world=3):
        assert worst < CLOSE
        assert names == ["0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"]
        assert same


def all_frozen() -> tuple[float, bool]:
    """A module without anything to train: it gives gradients of inputs."""
    net = stack().requires_grad_(False)
    beside = Beside.of(net)
    found = []
    for one, (x, y) in zip((beside.net, beside.alone), beside.batches(0), strict=True):
        x = x.clone().requires_grad_()
        loss_of(one, x, y).backward()
        found.append(x.grad)
    rank, world = dist.get_rank(), dist.get_world_size()
    ours, alone = found
    assert ours is not None
    assert alone is not None
    difference = float((ours / world - alone.chunk(world)[rank]).abs().max())
    return difference, all(one.grad is None for one in net.parameters())


def test_frozen_module(pool: Pool) -> None:
    for difference, none in pool.run(all_frozen):
        assert difference < CLOSE
        assert none
