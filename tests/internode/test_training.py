"""Training on several hosts gives what one process gives: DDP, FSDP2, DTensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from internode.hosts import TWO_OF_TWO, Hosts, Placement
from training.models import Mlp, sgd, train_alone
from training.test_ddp import check, compare, train

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")

UNEVEN: Placement = [[0], [1], [2], [3, 4]]
FOUR_OF_ONE: Placement = [[0], [1], [2], [3]]


def only_with(soak: bool, placement: Placement, long: Placement) -> None:
    if placement == long and not soak:
        pytest.skip("only with --soak")


def train_by_ddp() -> dict[str, list[float]]:
    return compare({})


@pytest.mark.parametrize("placement", [TWO_OF_TWO, [[0], [1], [2, 3]], FOUR_OF_ONE], ids=str)
def test_ddp_trains_as_one_process_does(hosts: Hosts, placement: Placement, soak: bool) -> None:
    only_with(soak, placement, FOUR_OF_ONE)
    check(hosts.run(placement, train_by_ddp))


def train_by_fsdp() -> tuple[list[float], list[float]]:
    model, alone = Mlp(), Mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return train(model, dist.group.WORLD), train_alone(alone, sgd(alone.parameters()))


@pytest.mark.parametrize("placement", [TWO_OF_TWO, UNEVEN, FOUR_OF_ONE], ids=str)
def test_fsdp_trains_as_one_process_does(hosts: Hosts, placement: Placement, soak: bool) -> None:
    only_with(soak, placement, FOUR_OF_ONE)
    for losses, alone in hosts.run(placement, train_by_fsdp):
        assert losses == pytest.approx(alone, rel=1e-5)


def multiply_dtensors() -> bool:
    """A matrix product sharded by columns and rows; with four ranks, on a mesh of both levels."""
    size = dist.get_world_size()
    shape = (2, 2) if size == 4 else (size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "ranks"))
    torch.manual_seed(0)
    left, right = torch.randn(64, 48), torch.randn(48, 32)
    a = distribute_tensor(left, mesh, [Shard(0), Shard(1)])
    b = distribute_tensor(right, mesh, [Replicate(), Shard(0)])
    product = (a @ b).redistribute(mesh, [Replicate(), Replicate()])
    assert isinstance(product, DTensor)
    return torch.allclose(product.to_local(), left @ right, atol=1e-4)


@pytest.mark.parametrize("placement", [TWO_OF_TWO, FOUR_OF_ONE, UNEVEN], ids=str)
def test_dtensors_multiply_as_tensors_do(hosts: Hosts, placement: Placement, soak: bool) -> None:
    only_with(soak, placement, UNEVEN)
    size = sum(len(ranks) for ranks in placement)
    assert hosts.run(placement, multiply_dtensors) == [True] * size
