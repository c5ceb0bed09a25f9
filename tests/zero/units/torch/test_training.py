"""Training in one unit and in several, beside one process and torch's FSDP2."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.sharding import my_batch
from zero.units.torch.beside import (
    CLOSE,
    Beside,
    Mlp,
    kinds,
    layers,
    loss_of,
    mean,
    shard_all,
    stack,
    theirs,
)

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
RESHARD = pytest.mark.parametrize("reshard", [True, False, None])


def single(inner: int) -> float:
    torch.manual_seed(42)
    net = nn.Sequential(Mlp(12, inner), nn.Linear(12, 5))
    beside = Beside.of(net, fully_shard)
    return beside.run(range(4)).end()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("inner", [24, 17, 3, 1])
def test_train_parity_single_group_shard_dim0(pool: Pool, inner: int, world: int) -> None:
    """With rows that divide by the ranks, that do not, and of which some ranks have none."""
    assert max(pool.run(single, inner, world=world)) < CLOSE


def alone_on_one_rank() -> float:
    return Beside.of(stack()).run(range(3)).end()


def test_train_parity_single_worldsize1(pool: Pool) -> None:
    assert pool.run(alone_on_one_rank, world=1) == [0.0]


def multi(reshard: bool | None) -> tuple[float, list[float], list[float]]:
    """The difference from one process; then the losses of FSDP2 beside ours."""
    beside = Beside.of(stack(), lambda net: shard_all(net, reshard_after_forward=reshard))
    worst = beside.run(range(4)).end()
    found = []
    for net in (
        shard_all(stack(), reshard_after_forward=reshard),
        theirs(stack(), reshard_after_forward=reshard),
    ):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        found.append([trained(net, optimizer, step) for step in range(6)])
    return worst, found[0], found[1]


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = loss_of(net, *my_batch(step))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return mean(loss)


@pytest.mark.parametrize("world", [2, 3])
@RESHARD
def test_train_parity_multi_group(pool: Pool, reshard: bool | None, world: int) -> None:
    for worst, ours, torchs in pool.run(multi, reshard, world=world):
        assert worst < CLOSE
        assert ours == pytest.approx(torchs, abs=CLOSE, rel=0)
        assert ours[-1] < ours[0]


def unsharded_ahead() -> float:
    """Each unit is unsharded by hand before the root runs."""
    beside = Beside.of(stack())

    def ahead(net: Any, x: Tensor, y: Tensor) -> Tensor:
        if net is beside.net:
            for one in (net, *layers(net)):
                one.unshard(async_op=True).wait()
            assert not any(kinds(net).values())
        return loss_of(net, x, y)

    return beside.run(range(3), ahead).end()


def test_train_parity_multi_group_unshard_async_op(pool: Pool) -> None:
    assert max(pool.run(unsharded_ahead)) < CLOSE


def non_root() -> tuple[float, list[str], float]:
    """The root's step; then one child's forward and backward; then the root's again."""
    beside = Beside.of(stack())
    beside.run([0])
    beside.clear()
    net, alone = layers(beside.net)[1], layers(beside.alone)[1]
    mine, all_ = beside.batches(1)
    net(mine[0]).square().mean().backward()
    alone(all_[0]).square().mean().backward()
    with_gradient = [name for name, one in beside.net.named_parameters() if one.grad is not None]
    beside.compare()
    child = beside.worst
    beside.backward(2)  # adds to what the child has
    beside.compare()
    beside.step()
    return child, with_gradient, beside.run([3]).end()


def test_non_root_forward_backward(pool: Pool) -> None:
    for child, names, worst in pool.run(non_root, world=3):
        assert child < CLOSE
        assert names == ["1.into.weight", "1.into.bias", "1.out.weight", "1.out.bias"]
        assert worst < CLOSE


class Twice(nn.Module):
    """Uses one child twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.outer, self.head = Mlp(12), Mlp(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.inner(x), self.inner(self.outer(x))
        out: Tensor = self.head(one + other)
        return out


def used_twice(reshard: bool | None) -> float:
    beside = Beside.of(Twice(), lambda net: shard_all(net, reshard_after_forward=reshard))
    return beside.run(range(4)).end()


def many_forwards(reshard: bool | None) -> float:
    """Three forward passes before one backward pass."""
    beside = Beside.of(Twice(), lambda net: shard_all(net, reshard_after_forward=reshard))

    def thrice(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outs = [net(x * factor) for factor in (1.0, 0.5, 2.0)]
        return sum((nn.functional.mse_loss(one, y) for one in outs), torch.zeros(()))

    return beside.run(range(4), thrice).end()


@RESHARD
def test_multi_forward_module(pool: Pool, reshard: bool | None) -> None:
    assert max(pool.run(used_twice, reshard)) < CLOSE
    assert max(pool.run(many_forwards, reshard)) < CLOSE


def prefetching() -> float:
    """Each unit names its neighbours, as scripts for FSDP2 do."""

    def shard(net: Any) -> Any:
        units = layers(shard_all(net))
        for before, after in itertools.pairwise(units):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        return net

    return Beside.of(stack(), shard).run(range(3)).end()


def test_explicit_prefetching(pool: Pool) -> None:
    assert max(pool.run(prefetching)) < CLOSE


def with_event() -> float:
    """An event is set after each step of the optimizer."""
    beside = Beside.of(stack())
    event = torch.Event("cpu")

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        beside.net.set_post_optim_event(event)

    beside.steppers[0].register_step_post_hook(after)
    return beside.run(range(4)).end()


def test_post_optim_event(pool: Pool) -> None:
    assert max(pool.run(with_event)) < CLOSE


class Shared(nn.Module):
    """Its head and its embedding have one weight, and two of its blocks are one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(30, 12)
        self.first, self.second = Mlp(12), Mlp(12)
        self.again = self.first
        self.head = nn.Linear(12, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding((x * 1000).long().abs() % 30)
        hidden = self.again(self.second(self.first(hidden)))
        out: Tensor = self.head(hidden).mean(1)[:, :5]
        return out


def with_shared(apart: bool) -> tuple[float, bool]:
    """In one unit, or with blocks and the head apart from the embedding."""

    def shard(net: Any) -> Any:
        for one in (net.first, net.second, *([net.head] if apart else [])):
            fully_shard(one)
        return fully_shard(net)

    beside = Beside.of(Shared(), shard)
    worst = beside.run(range(4)).end()
    net: Any = beside.net
    return worst, net.head.weight is net.embedding.weight


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_train_parity_with_shared_params(pool: Pool, apart: bool, world: int) -> None:
    for worst, is_tied in pool.run(with_shared, apart, world=world):
        assert worst < CLOSE
        assert is_tied


def to_double() -> tuple[float, float, list[torch.dtype]]:
    """Wrapped in float32, converted, trained in float64."""
    net = stack()
    alone = copy.deepcopy(net).double()
    beside = Beside(shard_all(net).double(), alone)
    worst = beside.run(range(4)).end()
    found: list[Tensor] = [*net.parameters()]
    found += [one.grad for one in net.parameters() if one.grad is not None]
    dtypes = [one.dtype for one in found]
    return worst, min(beside.losses), dtypes


def test_to_float64_after_init(pool: Pool) -> None:
    for worst, loss, dtypes in pool.run(to_double, world=3):
        assert worst < 1e-14
        assert loss > 0
        assert dtypes == [torch.float64] * 28
