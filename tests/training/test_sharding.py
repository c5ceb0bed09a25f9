"""Sharded training equals training in one process: FSDP2, ZeRO, tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from helpers.pool import Pool
from training.models import STEPS, Mlp, adam, batch, loss_of, shard, train_alone


def mean_loss(loss: torch.Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def train_shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        x, y = (shard(part, dist.get_rank(), dist.get_world_size()) for part in batch(step))
        loss = loss_of(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean_loss(loss))
    return losses


def alone() -> list[float]:
    model = Mlp()
    return train_alone(model, adam(model.parameters()))


def fsdp(mixed: bool, own_memory: bool) -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
        )
    model: Any = Mlp()
    modules = [model.first, model.middle, model]
    for module in modules:
        fully_shard(module, **options)
    if own_memory:
        for module in modules:
            module.set_allocate_memory_from_process_group_for_comm(True)
    return train_shards(model, adam(model.parameters())), alone()


@pytest.mark.parametrize("world", [2, 4])
def test_fsdp(pool: Pool, world: int) -> None:
    for ours, expected in pool.run(fsdp, False, False, world=world):
        assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.beyond_gloo("gloo allocates no memory")
@pytest.mark.parametrize("world", [2, 4])
def test_fsdp_with_memory_from_the_backend(pool: Pool, world: int) -> None:
    for ours, expected in pool.run(fsdp, False, True, world=world):
        assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.beyond_gloo("bfloat16")
@pytest.mark.parametrize("own_memory", [False, True])
def test_fsdp_with_mixed_precision(pool: Pool, own_memory: bool) -> None:
    for ours, expected in pool.run(fsdp, True, own_memory):
        assert ours == pytest.approx(expected, rel=5e-2)  # bfloat16 holds 8 bits
        assert ours[-1] < ours[0]


def zero(overlap_views: bool) -> tuple[list[float], list[float]]:
    model = DistributedDataParallel(Mlp())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=overlap_views
    )
    losses = train_shards(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    return losses, alone()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("views", [False, True])
def test_zero_redundancy_optimizer(pool: Pool, views: bool, world: int) -> None:
    for ours, expected in pool.run(zero, views, world=world):
        assert ours == pytest.approx(expected, rel=1e-5)


def tensor_parallel() -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(
        Mlp(), mesh, {"first": ColwiseParallel(), "middle": RowwiseParallel()}
    )
    return train_alone(model, adam(model.parameters())), alone()


@pytest.mark.parametrize("world", [2, 4])
def test_tensor_parallel(pool: Pool, world: int) -> None:
    for ours, expected in pool.run(tensor_parallel, world=world):
        assert ours == pytest.approx(expected, rel=1e-5)


def two_dimensional() -> tuple[list[float], list[float]]:
    """FSDP over one dimension of the mesh, tensor parallelism over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model: Any = parallelize_module(
        Mlp(), mesh["model"], {"first": ColwiseParallel(), "middle": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["data"])
    optimizer = adam(model.parameters())
    losses = []
    for step in range(STEPS):
        x, y = (shard(part, mesh["data"].get_local_rank(), 2) for part in batch(step))
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean_loss(loss))
    return losses, alone()


def test_fsdp_and_tensor_parallel(pool: Pool) -> None:
    for ours, expected in pool.run(two_dimensional, world=4):
        assert ours == pytest.approx(expected, rel=1e-5)


def gather_shards() -> list[float]:
    """The shard of a tensor of two rows, one on each rank."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    rank = dist.get_rank()
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    sharded = sharded_tensor.empty(spec, 2, 3)
    sharded.local_shards()[0].tensor.fill_(rank + 1)
    whole = torch.zeros(2, 3) if rank == 0 else None
    sharded.gather(dst=0, out=whole)
    return [] if whole is None else whole[:, 0].tolist()


def test_a_sharded_tensor_is_gathered_where_there_is_no_gpu(pool: Pool) -> None:
    assert pool.run(gather_shards) == [[1.0, 2.0], []]
