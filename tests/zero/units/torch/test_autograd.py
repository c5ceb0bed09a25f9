"""Outputs and modules that a backward pass leaves out, and outputs that are no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.sharding import my_batch, whole
from zero.units.torch.beside import (
    CLOSE,
    Beside,
    Mlp,
    kinds,
    layers,
    shard_all,
    stack,
)

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
RESHARD = pytest.mark.parametrize("reshard", [True, False, None])


class Halves(nn.Module):
    """Two outputs, each of a head of its own, and a layer that some passes leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.trunk, self.sometimes = Mlp(12), Mlp(12)
        self.left, self.right = nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x: Tensor, uses: bool = True) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        if uses:
            hidden = self.sometimes(hidden)
        return self.left(hidden), self.right(hidden)


def shard_halves(net: Any, reshard: bool | None) -> Any:
    return shard_all(net, reshard_after_forward=reshard)


def unused_output(reshard: bool | None) -> float:
    """The left output alone, then both, then the right one."""
    beside = Beside.of(Halves(), lambda net: shard_halves(net, reshard))

    def left(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(net(x)[0], y)

    def right(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(net(x)[1], y)

    def both(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        one, other = net(x)
        return nn.functional.mse_loss(one * other, y)

    beside.run([0], left).run([1], both).run([2], right).run([3], left)
    return beside.end()


@RESHARD
def test_unused_forward_output(pool: Pool, reshard: bool | None) -> None:
    assert max(pool.run(unused_output, reshard)) < CLOSE


def unused_module(reshard: bool | None) -> float:
    """A child that no rank's forward pass runs in some steps has no gradient then."""
    beside = Beside.of(Halves(), lambda net: shard_halves(net, reshard))

    def loss(net: nn.Module, x: Tensor, y: Tensor, uses: bool) -> Tensor:
        return nn.functional.mse_loss(sum(net(x, uses)), y)

    for number, uses in enumerate([True, False, False, True]):
        beside.run([number], lambda net, x, y, uses=uses: loss(net, x, y, uses))  # type: ignore[misc]
    return beside.end()


@RESHARD
def test_unused_forward_module(pool: Pool, reshard: bool | None) -> None:
    assert max(pool.run(unused_module, reshard)) < CLOSE


def unused_on_some(steps: int) -> tuple[list[float], list[float]]:
    """Other ranks leave the child out, by turns: its gradient there counts as zero."""
    worst = []
    net, alone = shard_all(Halves()), Halves()
    world = dist.get_world_size()
    for step in range(steps):
        x, y = my_batch(step)
        net.zero_grad()
        out = sum(net(x, dist.get_rank() == step % world))
        nn.functional.mse_loss(out, y).backward()
        alone.zero_grad()
        out = sum(alone(x, dist.get_rank() == step % world))
        nn.functional.mse_loss(out, y).backward()
        for ours, one in zip(net.parameters(), alone.parameters(), strict=True):
            found = torch.zeros_like(one) if one.grad is None else one.grad
            dist.all_reduce(found)
            worst.append(float((whole(ours.grad) - found / world).abs().max()))
    return worst, [float(one.grad.full_tensor().abs().max()) for one in net.sometimes.parameters()]


@pytest.mark.parametrize("world", [2, 3])
def test_reduce_scatter_unused_params(pool: Pool, world: int) -> None:
    """torch needs a setter for it."""
    for worst, sizes in pool.run(unused_on_some, 4, world=world):
        assert len(worst) == 4 * 12
        assert max(worst) < CLOSE
        assert min(sizes) > 1e-5


@dataclass
class Out:
    """As libraries of models give."""

    hidden: list[Tensor]
    logits: Tensor
    name: str = "out"


class Named(NamedTuple):
    logits: Tensor
    count: int


class Structured(nn.Module):
    """Passes other things than tensors between its children."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, given: Any) -> Any:
        x = self.inner(opened(given))
        if self.kind == "list":
            return [x, "text", None, 3]
        if self.kind == "dict":
            return {"x": {"deep": [x]}, "text": "text", "number": 3}
        if self.kind == "named":
            return Named(x, 3)
        return Out([x.detach()], x)


def opened(given: Any) -> Tensor:
    if isinstance(given, list):
        given = given[0]
    elif isinstance(given, dict):
        given = given["x"]["deep"][0]
    elif isinstance(given, (Out, Named)):
        given = given.logits
    assert isinstance(given, Tensor)
    return given


def nontensor(kind: str) -> tuple[float, str]:
    blocks = [Structured(one, kind) for one in stack()]
    beside = Beside.of(nn.Sequential(*blocks), shard_all)

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(opened(net({"x": {"deep": [x]}, "other": 1})), y)

    beside.run(range(3), loss)
    return beside.end(), type(beside.net(beside.batches(0)[0][0])).__name__


@pytest.mark.parametrize(
    ("kind", "name"),
    [("list", "list"), ("dict", "dict"), ("named", "Named"), ("dataclass", "Out")],
)
def test_nontensor_activations(pool: Pool, kind: str, name: str) -> None:
    for worst, found in pool.run(nontensor, kind):
        assert worst < CLOSE
        assert found == name


class Detached(nn.Module):
    """Its second child gets no gradient from above."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = Mlp(12), Mlp(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(x) + self.second(x).detach())
        return out


def detached() -> tuple[float, list[str], set[bool]]:
    beside = Beside.of(Detached(), lambda net: [fully_shard(net.second), fully_shard(net)][1])
    worst = beside.run(range(3)).end()
    names = [name for name, one in beside.net.named_parameters() if one.grad is None]
    return worst, names, set(kinds(beside.net).values())


def test_detached_module(pool: Pool) -> None:
    for worst, names, registered in pool.run(detached):
        assert worst < CLOSE
        assert [name.split(".")[0] for name in names] == ["second"] * 4
        assert registered == {True}


def many_inputs() -> float:
    """Keywords, defaults, and inputs that need gradients themselves."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.blocks = stack(2)

        def forward(self, x: Tensor, *more: Tensor, bias: Tensor | None = None) -> Tensor:
            out: Tensor = self.blocks(x + sum(more))
            return out if bias is None else out + bias

    def shard(net: Any) -> Any:
        for one in layers(net.blocks):
            fully_shard(one)
        return fully_shard(net)

    beside = Beside.of(Mixed(), shard)

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        bias = torch.ones(5, requires_grad=True)
        return nn.functional.mse_loss(net(x, x * 0.1, x.square(), bias=bias), y)

    return beside.run(range(3), loss).end()


def test_forward_inputs(pool: Pool) -> None:
    assert max(pool.run(many_inputs)) < CLOSE
