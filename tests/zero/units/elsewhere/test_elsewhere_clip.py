"""Norms of gradients that torch's FSDP2 has reduced: beside one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dreamcomm.zero.units.elsewhere.module import shard_elsewhere
from helpers.pool import Pool
from zero.units.elsewhere.elsewhere_net import (
    MESHES,
    WHY,
    Net,
    data,
    difference,
    everything,
    loss_of,
    part,
    sharded,
)

pytestmark = pytest.mark.beyond_gloo("makes its Gloo groups beside dreamcomm's")


def clipped(kind: str, p: float) -> tuple[float, float, float, str]:
    net, alone = sharded(kind), Net()
    loss_of(net, 0, part).backward()
    loss_of(alone, 0, everything).backward()
    theirs = nn.utils.clip_grad_norm_(alone.parameters(), 0.01, p)
    ours = net.clip_grad_norm_(0.01, p)
    kind_of = f"{type(ours).__name__} {ours.dtype} {ours.dim()}"
    return float(ours), float(theirs), difference(net, alone), kind_of


@MESHES
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_norms_are_those_of_one_process(pool: Pool, kind: str, world: int, p: float) -> None:
    found = pool.run(clipped, kind, p, world=world)
    assert len({ours for ours, _, _, _ in found}) == 1
    for ours, theirs, worst, kind_of in found:
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert worst < 1e-8
        assert kind_of == "Tensor torch.float32 0"


def not_finite() -> tuple[str, bool]:
    net = sharded("gloo")
    (loss_of(net, 0, part) * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    before = [p.grad.to_local().clone() for p in net.parameters()]
    with pytest.raises(RuntimeError) as raised:
        net.clip_grad_norm_(1.0, error_if_nonfinite=True)
    pairs = zip(before, net.parameters(), strict=True)
    same = all(torch.equal(a.nan_to_num(), p.grad.to_local().nan_to_num()) for a, p in pairs)
    return str(raised.value), same


def test_a_norm_that_is_not_finite_is_an_error_of_all_ranks(pool: Pool) -> None:
    for rank, (text, same) in enumerate(pool.run(not_finite)):
        assert text.startswith(f"rank {rank}: the 2-norm of the gradients is ")
        assert same


def unsharded_after_backward() -> tuple[float, float]:
    """Where whole parameters stay registered, the shards' gradients are clipped all the same."""
    net, alone = sharded("gloo"), Net()
    net.set_reshard_after_backward(False)
    loss_of(net, 0, part).backward()
    loss_of(alone, 0, everything).backward()
    return float(net.clip_grad_norm_(1e9)), float(nn.utils.clip_grad_norm_(alone.parameters(), 1e9))


def test_gradients_count_while_whole_parameters_are_registered(pool: Pool) -> None:
    for ours, theirs in pool.run(unsharded_after_backward):
        assert ours == pytest.approx(theirs, rel=1e-6)


def tensor_parallel() -> tuple[float, float, float]:
    """Columns and rows are sharded on one dimension of the mesh, and what is left on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(1)
    net: Any = nn.Sequential(nn.Linear(12, 18), nn.Tanh(), nn.Linear(18, 1))
    alone = copy.deepcopy(net)
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shard_elsewhere(net, WHY, mesh=mesh["data"])
    with net.rewrite():
        for one in net.parameters() if dist.get_rank() == 0 else ():
            one.mul_(0.5)
    with torch.no_grad():
        for one in alone.parameters():
            one.mul_(0.5)
    x, y = data(0)
    row = mesh["data"].get_local_rank()
    nn.functional.mse_loss(net(x.chunk(2)[row]), y.chunk(2)[row]).backward()
    nn.functional.mse_loss(alone(x), y).backward()
    ours = float(net.clip_grad_norm_(1e9))
    return difference(net, alone, "data"), difference(net, alone), ours


def test_beside_tensor_parallelism(pool: Pool) -> None:
    found = pool.run(tensor_parallel, world=4)
    assert len({norm for _, _, norm in found}) == 1
    for values, gradients, norm in found:
        assert values == 0
        assert gradients < 1e-6
        assert norm > 0
