"""Lists of modules as one unit, such as a norm and a head that is called by chunks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.sharding import my_batch
from zero.units.torch.beside import CLOSE, Beside, Mlp, kinds, layers, loss_of, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


class Chunked(nn.Module):
    """Its forward pass ends before the head, which the loss calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.blocks = nn.Sequential(Mlp(12), Mlp(12))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.blocks(x))
        return out


def shard_chunked(net: Any) -> Any:
    for one in net.blocks:
        fully_shard(one)
    fully_shard([net.norm, net.head])
    return fully_shard(net)


def losses(net: Any, hidden: Tensor, y: Tensor) -> list[Tensor]:
    pairs = zip(hidden.chunk(3), y.chunk(3), strict=True)
    return [nn.functional.mse_loss(net.head(some), aim, reduction="sum") for some, aim in pairs]


def at_once(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The chunks' losses are added up before one backward pass."""
    return torch.stack(losses(net, net(x), y)).sum() / y.numel()


def each(beside: Beside, number: int) -> None:
    """Each chunk has a backward pass of its own, down to the hidden states; then these have one."""
    sides = zip((beside.net, beside.alone), beside.batches(number), strict=True)
    for net, (x, y) in sides:
        hidden = net(x)
        leaf = hidden.detach().requires_grad_()
        for some, aim in zip(leaf.chunk(3), y.chunk(3), strict=True):
            loss = nn.functional.mse_loss(net.head(some), aim, reduction="sum")  # type: ignore[operator]
            (loss / y.numel()).backward()
        hidden.backward(leaf.grad)


def chunked(how: str) -> tuple[float, set[bool]]:
    beside = Beside.of(Chunked(), shard_chunked)
    net: Any = beside.net
    if how == "at once":
        beside.run(range(4), at_once)
    for step in range(4 if how != "at once" else 0):
        beside.clear()
        if how == "held back":
            net.set_is_last_backward(False)
            net.set_requires_gradient_sync(False)
            each(beside, 10 + step)
            net.set_is_last_backward(True)
            net.set_requires_gradient_sync(True)
        each(beside, step)
        beside.compare()
        beside.step()
    return beside.end(), set(kinds(net).values())


@pytest.mark.parametrize("how", ["at once", "each", "held back"])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_chunked_loss(pool: Pool, how: str, world: int) -> None:
    for worst, registered in pool.run(chunked, how, world=world):
        assert worst < CLOSE
        assert registered == {True}


def whole_group() -> float:
    """The root's forward pass runs all modules of the list, whose gradients come together."""

    def shard(net: Any) -> Any:
        first, second, third, head = layers(net)
        fully_shard([first, third])
        fully_shard([second, head])
        return fully_shard(net)

    return Beside.of(stack(), shard).run(range(4)).end()


def test_list_of_mlps(pool: Pool) -> None:
    assert max(pool.run(whole_group, world=3)) < CLOSE


class Some(nn.Module):
    """Its forward pass leaves a module of a list out in every second call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.always, self.sometimes = Mlp(12), Mlp(12)
        self.head = nn.Linear(12, 5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.always(x)
        if self.calls % 2:
            x = self.sometimes(x)
        out: Tensor = self.head(x)
        return out


def partly() -> tuple[float, list[bool]]:
    """A part of a unit runs; gradients of the rest stay away."""

    def shard(net: Any) -> Any:
        fully_shard([net.always, net.sometimes])
        return fully_shard(net)

    beside = Beside.of(Some(), shard)
    missing = []
    for step in range(4):
        beside.run([step])
        missing.append(next(beside.net.sometimes.parameters()).grad is None)  # type: ignore[union-attr,operator]
    return beside.end(), missing


def test_partial_group_forward(pool: Pool) -> None:
    for worst, missing in pool.run(partly):
        assert worst < CLOSE
        assert missing == [False, True, False, True]


def given() -> tuple[bool, list[str], list[str], str]:
    """What fully_shard gives back; a list within another's modules counts once."""
    torch.manual_seed(0)
    outer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    other = nn.Linear(3, 3)
    found = fully_shard([outer, outer[0], other])
    names = [type(one).__name__ for one in (outer, outer[0], other)]
    both = nn.Sequential(outer, other)
    fully_shard(both)
    both(torch.ones(1, 3)).sum().backward()
    grads = [name for name, one in both.named_parameters() if one.grad is not None]
    return found[0] is outer and found[2] is other, names, grads, type(found).__name__


def test_managed_modules_list(pool: Pool) -> None:
    for same, names, grads, kind in pool.run(given):
        assert (same, kind) == (True, "list")
        assert names == ["FSDPSequential", "Linear", "FSDPLinear"]
        assert len(grads) == 6


def as_root() -> tuple[list[str], float]:
    """A list with no root above is refused when it is run; given a root, it works."""
    first, second = nn.Linear(12, 12), nn.Linear(12, 5)
    net = nn.Sequential(first, second)
    alone = copy.deepcopy(net)
    fully_shard([first, second])
    found = []
    for call in (
        lambda: loss_of(net, *my_batch(0)),
        lambda: first(torch.ones(1, 12)),
        lambda: first.unshard(),  # type: ignore[operator]
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    fully_shard(net)
    return found, Beside(net, alone).run(range(2)).end()


def test_fully_shard_multi_module_root(pool: Pool) -> None:
    for found, worst in pool.run(as_root):
        assert len(found) == 3
        assert all("root" in one and "Linear" in one for one in found)
        assert worst < CLOSE
