"""Meshes over some of the ranks, and one rank alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ddp.models import batch
from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, loss_of, shard_all, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def mine(mesh: DeviceMesh, one: Tensor) -> Tensor:
    return one.chunk(mesh.size())[mesh.get_local_rank()]


def trained(mesh: DeviceMesh, first: int) -> float:
    """Steps on batches of the mesh's own, beside one process with these."""
    net, alone = shard_all(stack(), mesh=mesh), stack()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, alone)]
    worst = 0.0
    for step in range(first, first + 3):
        x, y = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(net, mine(mesh, x), mine(mesh, y)).backward()
        loss_of(alone, x, y).backward()
        pairs = list(zip(net.parameters(), alone.parameters(), strict=True))
        found = [one.grad.full_tensor() - other.grad for one, other in pairs]
        for optimizer in optimizers:
            optimizer.step()
        found += [one.full_tensor() - other for one, other in pairs]
        worst = max([worst, *(float(one.abs().max()) for one in found)])
    return worst


def in_halves() -> tuple[float, int]:
    """Two groups of two ranks train models of their own, with other data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))["shards"]
    return trained(mesh, 10 * (dist.get_rank() // 2)), mesh.size()


def test_train_parity_on_a_dimension_of_a_mesh(pool: Pool) -> None:
    for worst, size in pool.run(in_halves, world=4):
        assert worst < CLOSE
        assert size == 2


def in_a_part() -> float:
    """Ranks 0 and 2 train; rank 1 does nothing meanwhile."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return 0.0
    return trained(DeviceMesh.from_group(group, "cpu"), 0)


def test_train_parity_partial_groups(pool: Pool) -> None:
    assert max(pool.run(in_a_part, world=3)) < CLOSE


def of_both_groups() -> float:
    """One model over all ranks, another over half of them, in one script."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))["shards"]
    everywhere = Beside.of(stack())
    everywhere.run([0])
    half = trained(mesh, 10 * (dist.get_rank() // 2))
    return max(half, everywhere.run([1, 2]).end())


def test_train_parity_of_two_groups(pool: Pool) -> None:
    assert max(pool.run(of_both_groups, world=4)) < CLOSE


def mixed_meshes() -> tuple[str, float]:
    """Units of one root have one mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))["shards"]
    net: Any = stack()
    fully_shard(net[0], mesh=mesh)
    found = ""
    try:
        fully_shard(net)
    except ValueError as error:
        found = str(error)
    beside = Beside.of(stack(), lambda one: shard_all(one, mesh=init_device_mesh("cpu", (4,))))
    return found, beside.run(range(2)).end()


def test_meshes_of_one_root(pool: Pool) -> None:
    for rank, (found, worst) in enumerate(pool.run(mixed_meshes, world=4)):
        pair = [0, 1] if rank < 2 else [2, 3]
        assert f"got ranks [0, 1, 2, 3], and ranks {pair} for FSDPMlp" in found
        assert worst < CLOSE
