"""What fully_shard takes and refuses, and the rows that each rank has then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, Mlp, shard_all, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def on_one(module: nn.Module) -> nn.Module:
    module.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,))))
    return module


def child_after_root() -> Any:
    net = stack()
    fully_shard(net)
    return fully_shard(net[0])


def shared_twice() -> Any:
    net = Nested()
    fully_shard(net.first)
    return fully_shard(net.again)


def of_another_shape(wanted: int) -> Any:
    return fully_shard(nn.Linear(4, 4), reshard_after_forward=wanted)


def along(dim: int) -> Any:
    return fully_shard(
        stack(), shard_placement_fn=lambda one: Shard(dim) if one.dim() > 1 else None
    )


# What is done, the error, and what its text has.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a unit twice": (lambda: fully_shard(shard_all(stack())), ValueError, "is sharded already"),
    "a shared module twice": (shared_twice, ValueError, "is sharded already"),
    "a unit in a list": (
        lambda: fully_shard([nn.Linear(2, 2), fully_shard(nn.Linear(2, 2))]),
        ValueError,
        "is sharded already",
    ),
    "a child after its root": (child_after_root, ValueError, "DTensor already"),
    "ModuleList": (
        lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])), ValueError, "no forward()"
    ),
    "ModuleDict": (
        lambda: fully_shard([nn.ModuleDict({"a": nn.Linear(2, 2)})]), ValueError, "no forward()"
    ),
    "a tensor": (lambda: fully_shard([torch.ones(2)]), ValueError, "got Tensor"),
    "a number": (lambda: fully_shard(3), ValueError, "got int"),
    "an empty list": (lambda: fully_shard([]), ValueError, "got an empty list"),
    "a DTensor": (lambda: fully_shard(on_one(nn.Linear(4, 4))), ValueError, "DTensor already"),
    "integers": (
        lambda: fully_shard(Whole()), ValueError, "torch.int64, expected a floating-point type"
    ),
    "no shape yet": (lambda: fully_shard(nn.LazyLinear(3)), ValueError, "no shape yet"),
    "max_norm": (
        lambda: fully_shard(nn.Embedding(4, 2, max_norm=1.0)), ValueError, "leave max_norm out"
    ),
    "another world": (lambda: of_another_shape(2), NotImplementedError, "got 2"),
    "columns": (lambda: along(1), NotImplementedError, "got S(1)"),
    "meshes": (
        lambda: fully_shard(nn.Linear(2, 2), dp_mesh_dims="dp"), NotImplementedError, "dp_mesh_dims"
    ),
    "by torch after ours": (
        lambda: torchs.fully_shard(fully_shard(nn.Linear(2, 2))), Exception, "fully_shard"
    ),
}  # fmt: skip


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)


def refused(name: str) -> tuple[str, str, float]:
    """The error, and the difference of a module that is sharded next."""
    call, kind, _ = REFUSED[name]
    try:
        call()
    except kind as error:
        found = f"{type(error).__name__}", str(error)
    return *found, Beside.of(stack()).run(range(2)).end()


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments(pool: Pool, name: str) -> None:
    for kind, text, worst in pool.run(refused, name):
        assert REFUSED[name][2] in text
        assert REFUSED[name][1] is Exception or kind == REFUSED[name][1].__name__
        assert worst < CLOSE


def accepted() -> tuple[float, float, float]:
    """Arguments that mean the default, and a list with a forward of its own."""

    class Runs(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for one in self:
                x = one(x)
            return x

    def placed(one: nn.Parameter) -> Shard | None:
        return Shard(0) if one.dim() > 1 else None

    def shard(net: Any) -> Any:
        return shard_all(
            net,
            mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)),
            shard_placement_fn=placed,
            mp_policy=torchs.MixedPrecisionPolicy(),
            offload_policy=torchs.OffloadPolicy(),
            ignored_params=set(),
            dp_mesh_dims=None,
        )

    lists = Runs(list(stack()))
    return (
        Beside.of(stack(), shard).run(range(2)).end(),
        Beside.of(lists, fully_shard).run(range(2)).end(),
        Beside.of(stack(), lambda net: shard_all(net, mesh=None)).run(range(2)).end(),
    )


def test_valid_arguments(pool: Pool) -> None:
    for found in pool.run(accepted):
        assert max(found) < CLOSE


class Shapes(nn.Module):
    """Rows of every number, a scalar, a matrix without rows, and rows that lie apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(21)
        for number in range(1, 9):
            setattr(self, f"rows{number}", nn.Parameter(torch.randn(number, 3)))
        self.scalar = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(3, 6).t())
        self.apart = nn.Parameter(torch.randn(5, 8)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for one in self.parameters():
            total = total + (one * one).sum() / 100
        return x[:, :5] * total


def placed() -> list[tuple[str, bool, bool, bool, bool]]:
    """Of each parameter whether its rows, spec, storage and values are right."""
    net = Shapes()
    before = {name: one.detach().clone() for name, one in net.named_parameters()}
    fully_shard(net)
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for name, one in net.named_parameters():
        assert isinstance(one, DTensor)
        whole, local = before[name], one.to_local()
        rows = list(whole.chunk(world)) if whole.dim() else [whole] * world
        mine = rows[rank] if rank < len(rows) else whole[:0]
        placement = Shard(0) if whole.dim() else Replicate()
        found.append(
            (
                name,
                torch.equal(local, mine) and local.shape == mine.shape,
                one.placements == (placement,) and one.shape == whole.shape,
                local.untyped_storage().nbytes() == local.nbytes,
                torch.equal(one.full_tensor(), whole),
            )
        )
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_shard_tensor_parameters(pool: Pool, world: int) -> None:
    for found in pool.run(placed, world=world):
        assert len(found) == 12
        assert [name for name, *facts in found if not all(facts)] == []


def of_shapes() -> float:
    return Beside.of(Shapes().double(), fully_shard).run(range(3)).end()


@pytest.mark.parametrize("world", [2, 4])
def test_scalar_and_noncontiguous_parameters(pool: Pool, world: int) -> None:
    """torch refuses both."""
    assert max(pool.run(of_shapes, world=world)) < 1e-13


def own_values() -> tuple[list[bool], str]:
    """Where ranks begin with other values each gives its rows, as torch's; report() says so."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net = stack()
    with torch.no_grad():
        for one in net.parameters():
            one.fill_(float(rank))
    shard_all(net)
    right = []
    for one in net.parameters():
        rows = torch.arange(one.shape[0]) // -(-one.shape[0] // world)
        found = one.full_tensor()  # type: ignore[operator]
        right.append(torch.equal(found, rows.view(-1, *[1] * (one.dim() - 1)).expand_as(found)))
    return right, net.report()


def test_each_rank_gives_its_rows(pool: Pool) -> None:
    for right, report in pool.run(own_values, world=3):
        assert right == [True] * 14
        assert "had other values on each rank" in report


def attributes() -> tuple[list[Any], float]:
    """Attributes, names, frozen states and hooks on gradients stay; buffers are left alone."""
    net = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 5))
    alone = copy.deepcopy(net)
    seen: list[tuple[int, ...]] = []
    net[0].weight.tag = "mine"
    net[0].weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    buffers = {name: id(one) for name, one in net.named_buffers()}
    names = [name for name, _ in net.named_parameters()]
    fully_shard(net)
    beside = Beside(net, alone)
    net.eval()
    alone.eval()
    worst = beside.run(range(2)).end()
    weight: Any = net[0].weight
    found = [weight.tag, seen, {name: id(one) for name, one in net.named_buffers()} == buffers]
    found.append([name for name, _ in net.named_parameters()] == names)
    return found, worst


def test_attributes_and_hooks_are_kept(pool: Pool) -> None:
    for found, worst in pool.run(attributes):
        assert found == ["mine", [(12, 12)] * 2, True, True]
        assert worst < CLOSE


class Nested(nn.Module):
    """Modules and parameters in several places of one tree."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(4), nn.Sequential(Mlp(4), Mlp(4))
        self.again = self.first
        self.tied = nn.Linear(4, 4)
        self.tied.weight = nn.Parameter(torch.zeros(4, 4))
        self.also = nn.Linear(4, 4, bias=False)
        self.also.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.also(self.tied(self.second(self.again(self.first(x)))))
        return out


def managed() -> list[list[str]]:
    """The parameters that each unit shows when it is unsharded."""
    net: Any = Nested()
    units = [net.second[0], net.second, net.first, net]
    for one in units:
        fully_shard(one)
    found = []
    for one in units:
        one.unshard()
        found.append([name for name, p in net.named_parameters() if not isinstance(p, DTensor)])
        one.reshard()
    return found


def test_managed_states_nested_fully_shard(pool: Pool) -> None:
    mlp = ["into.weight", "into.bias", "out.weight", "out.bias"]
    for found in pool.run(managed):
        assert found == [
            [f"second.0.{name}" for name in mlp],
            [f"second.1.{name}" for name in mlp],
            [f"first.{name}" for name in mlp],
            ["tied.weight", "tied.bias"],
        ]
