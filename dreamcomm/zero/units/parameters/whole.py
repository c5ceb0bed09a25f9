"""Whole tensors of DTensors: by one rank for all, and their shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["own_shard", "told", "whole_of"]


@torch.no_grad()
def whole_of(sharded: DTensor) -> Tensor:
    """All elements of a parameter, in memory of their own. Collective."""
    mesh, local = sharded.device_mesh, sharded.to_local()
    if local.device.type != mesh.device_type:  # offloaded
        shape, stride = sharded.shape, sharded.stride()
        moved = local.to(mesh.device_type)
        sharded = DTensor.from_local(
            moved, mesh, sharded.placements, run_check=False, shape=shape, stride=stride
        )
    whole = sharded.full_tensor()
    if whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
        whole = whole.clone()  # a mesh of one rank
    return whole.to(local.device)


def told(mine: Tensor | None, sharded: DTensor) -> Tensor:
    """The writer's values of a parameter. ``mine``: the writer has them. Collective."""
    mesh = sharded.device_mesh
    if mine is None:
        sent = torch.empty(sharded.shape, dtype=sharded.dtype, device=mesh.device_type)
    else:
        sent = mine.to(device=mesh.device_type, dtype=sharded.dtype).contiguous()
    # Along each dimension from its first rank: the mesh's first one tells all others.
    for dimension in range(mesh.ndim):
        dist.broadcast(sent, group=mesh.get_group(dimension), group_src=0)
    return sent


def own_shard(whole: Tensor, sharded: DTensor) -> Tensor:
    """This rank's elements of a tensor that all ranks have."""
    mesh = sharded.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=sharded.placements).to_local()
