"""Over which ranks a tree's parameters are sharded, and over which they are the same.

A mesh of one dimension shards. One of two replicates over the first, and shards over the second::

    mesh [[0, 1], [2, 3]]     rank 0 and 2 have the same rows, and 1 and 3
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["everyone", "replicas_of", "shards_of"]


def shards_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group that has one copy of the parameters together."""
    return mesh.get_group(mesh.ndim - 1)


def replicas_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of ranks that have the same rows; None: there is one copy."""
    return mesh.get_group(0) if mesh.ndim == 2 else None


def everyone(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of the mesh. Collective at a mesh's first call.

    Raises:
        ValueError: the mesh has a part of all ranks, and its dimensions have no names.
    """
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    if mesh.mesh_dim_names is None:
        raise ValueError(
            "fully_shard: expected mesh_dim_names of a mesh of two dimensions that has a part of "
            "all ranks: the ranks of both dimensions meet in a group that torch makes by name"
        )
    return mesh._flatten().get_group()
