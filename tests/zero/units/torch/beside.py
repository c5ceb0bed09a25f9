"""Modules under fully_shard beside the same modules in one process, which sees the whole batch.

The tests of this folder are named after those of torch's own suite for FSDP2, whose situations they
cover. They are written for dreamcomm.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ddp.models import batch
from dreamcomm.zero import fully_shard
from zero.units.sharding import part, whole

__all__ = ["Beside", "Mlp", "kinds", "layers", "loss_of", "mean", "shard_all", "stack", "theirs"]

CLOSE = 1e-6
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Mlp(nn.Module):
    """Twice as wide inside; its output is as wide as its input."""

    def __init__(self, width: int, inner: int | None = None) -> None:
        super().__init__()
        inner = 2 * width if inner is None else inner
        self.into, self.out = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.out(torch.tanh(self.into(x))))
        return out


def stack(count: int = 3, width: int = 12) -> nn.Sequential:
    """The same weights in every call: blocks, and a head of 5 outputs."""
    torch.manual_seed(42)
    return nn.Sequential(*(Mlp(width) for _ in range(count)), nn.Linear(width, 5))


def layers(net: nn.Module) -> list[Any]:
    return list(net.children())


def shard_all(net: Any, shard: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    """Makes a unit of each child, and one of the root."""
    for one in layers(net):
        shard(one, **options)
    return shard(net, **options)


def theirs(net: Any, **options: Any) -> Any:
    """The same by torch's FSDP2 on Gloo. Collective."""
    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    return shard_all(net, torchs.fully_shard, mesh=mesh, **options)


def kinds(net: nn.Module) -> dict[str, bool]:
    """Whether each registered parameter is a DTensor."""
    return {name: isinstance(one, DTensor) for name, one in net.named_parameters()}


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(net(x), y)


def mean(value: Tensor) -> float:
    """The ranks' mean. Collective."""
    total = value.detach().clone().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def furthest(ours: Iterable[Tensor | None], alone: Iterable[Tensor | None]) -> float:
    """The largest difference; infinite where one has a tensor and the other none. Collective."""
    worst = 0.0
    for one, other in zip(ours, alone, strict=True):
        if one is None or other is None:
            worst = worst if one is other else float("inf")
            continue
        found = whole(one)
        if found.shape != other.shape or found.dtype != other.dtype:
            return float("inf")
        if found.numel() > 0:
            worst = larger(worst, float((found - other).abs().max()))
    return worst


def larger(one: float, other: float) -> float:
    """Their maximum, and infinite where any is NaN."""
    return float("inf") if math.isnan(one) or math.isnan(other) else max(one, other)


class Beside:
    """A sharded module and its copy in one process, which are stepped by SGD with momentum.

    Args:
        net: sharded.
        alone: its copy from before.
        lr: of both.

    Attributes:
        worst: the largest difference of any loss, gradient or weight until now.
        losses: of the copy.
    """

    def __init__(self, net: nn.Module, alone: nn.Module, lr: float = 0.1) -> None:
        self.net, self.alone = net, alone
        self.steppers = [
            torch.optim.SGD(one.parameters(), lr=lr, momentum=0.9) for one in (net, alone)
        ]
        self.parameters = [list(one.parameters()) for one in (net, alone)]
        self.worst = 0.0
        self.losses: list[float] = []
        self.dtype = next(alone.parameters()).dtype

    @classmethod
    def of(cls, net: nn.Module, shard: Callable[[Any], Any] = shard_all, **how: Any) -> Beside:
        alone = copy.deepcopy(net)
        return cls(shard(net), alone, **how)

    def run(self, numbers: Iterable[int], loss: Loss = loss_of) -> Beside:
        """Whole steps with the batches of these numbers."""
        for number in numbers:
            self.clear()
            self.backward(number, loss)
            self.compare()
            self.step()
        return self

    def batches(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of a batch, and all of it."""
        x, y = batch(number, self.dtype)
        return [(part(x), part(y)), (x, y)]

    def backward(self, number: int, loss: Loss = loss_of, scale: float = 1.0) -> None:
        mine, all_ = self.batches(number)
        ours = loss(self.net, *mine) * scale
        ours.backward()
        alone = loss(self.alone, *all_) * scale
        alone.backward()
        self.losses.append(float(alone.detach()))
        self.note(abs(mean(ours) - self.losses[-1]))

    def note(self, difference: float) -> None:
        self.worst = larger(self.worst, difference)

    def compare(self) -> None:
        """Notes how far gradients and weights are from those of the copy. Collective."""
        ours, alone = self.parameters
        self.note(furthest([one.grad for one in ours], [one.grad for one in alone]))
        self.note(furthest(ours, alone))

    def clear(self, set_to_none: bool = True) -> None:
        for one in self.steppers:
            one.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for one in self.steppers:
            one.step()

    def end(self) -> float:
        """The largest difference, that of the last weights included. Collective."""
        self.note(furthest(self.net.parameters(), self.alone.parameters()))
        return self.worst
