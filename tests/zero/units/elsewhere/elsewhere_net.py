"""A model that torch's FSDP2 runs with our methods on it, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dreamcomm.zero.units.elsewhere.module import shard_elsewhere

WHY = "the group is Gloo's"
MESHES = pytest.mark.parametrize(("kind", "world"), [("gloo", 2), ("hsdp", 4)])


class Net(nn.Module):
    """Uneven rows, a tied weight, and a layer that may get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Sequential(nn.Linear(12, 35), nn.Tanh())
        self.middle = nn.Linear(35, 35)
        self.maybe = nn.Linear(35, 35)
        self.last = nn.Linear(35, 1)
        self.tied = nn.Linear(12, 35, bias=False)
        self.tied.weight = self.first[0].weight

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        hidden = torch.tanh(self.middle(self.first(x) + self.tied(x)))
        more = self.maybe(hidden)
        hidden = hidden + (more.detach() if skip else more)
        out: Tensor = self.last(hidden)
        return out


def mesh_of(kind: str) -> DeviceMesh:
    if kind == "gloo":
        return DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


def sharded(kind: str, **arguments: Any) -> Any:
    net, mesh = Net(), mesh_of(kind)
    for module in (net.middle, net.maybe, net):
        shard_elsewhere(module, WHY, mesh=mesh, **arguments)
    return net


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 12, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def part(one: Tensor) -> Tensor:
    return one.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(net: nn.Module, step: int, take: Callable[[Tensor], Tensor], **how: Any) -> Tensor:
    x, y = (take(one) for one in data(step))
    return nn.functional.mse_loss(net(x, **how), y)


def everything(one: Tensor) -> Tensor:
    return one


def whole(one: Tensor) -> Tensor:
    return one.full_tensor() if isinstance(one, DTensor) else one


def difference(net: nn.Module, alone: nn.Module, of: str = "grad") -> float:
    """The largest of any gradient, or of any value with ``of="data"``. Collective."""
    pairs = zip(net.parameters(), alone.parameters(), strict=True)
    found = [(whole(getattr(a, of)), getattr(b, of)) for a, b in pairs]
    return max(float((a - b).abs().max()) for a, b in found)
