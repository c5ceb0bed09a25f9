"""Arguments of DistributedDataParallel, checked and in one form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from dreamcomm._torch.groups import given_group
from dreamcomm.buckets.engine import Caps

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["WHAT", "caps_of", "device_index", "group_of", "is_module"]

MIB = 1 << 20
WHAT = "DistributedDataParallel"


def group_of(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The group that reduces. Raises RuntimeError where two are given, as torch does."""
    if group is not None and mesh is not None:
        raise RuntimeError(f"{WHAT}: give process_group or device_mesh, not both")
    if mesh is None:
        return given_group(group)
    if mesh.ndim != 1:
        raise RuntimeError(
            f"{WHAT}: expected a mesh of one dimension, got {mesh}; give a part of it"
        )
    return mesh.get_group(mesh_dim=0)


def is_module(module: object) -> bool:
    """Whether it is one: arguments may be of any type."""
    return isinstance(module, nn.Module)


def device_index(device: int | torch.device) -> int:
    """The number of a GPU."""
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


def caps_of(megabytes: float | None, each: list[float] | None) -> Caps:
    """The sizes of buckets, from mebibytes."""
    if megabytes is not None and each:
        raise ValueError(f"{WHAT}: give bucket_cap_mb or bucket_cap_mb_list, not both")
    sizes = [] if megabytes is None else [megabytes]
    if any(not size > 0 for size in [*sizes, *(each or [])]):
        raise ValueError(f"{WHAT}: expected caps of buckets above 0 MiB, got {sizes or each}")
    if each:
        caps = tuple(max(1, int(size * MIB)) for size in each)
        return Caps(caps[-1], caps[0], caps)
    cap = int((25 if megabytes is None else megabytes) * MIB)
    return Caps(max(1, cap), max(1, cap if megabytes is not None else MIB))
