"""This rank's rows of tensors that a state has: of whole ones, and of DTensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from dreamcomm.zero.engine import WHAT
from dreamcomm.zero.per_element import PER_ELEMENT
from dreamcomm.zero.shards import ParameterShard

__all__ = ["adopt_state", "check_part", "rows_of"]


def rows_of(one: ParameterShard, value: Tensor, ranks: Sequence[int]) -> Tensor:
    """A copy of this rank's rows of a tensor of the parameter's shape.

    Collective for a DTensor of another layout than Shard(0) over the same ranks.

    Args:
        ranks: of the optimizer's group, in its order.
    """
    if isinstance(value, DTensor):
        local = value.to_local()
        if _is_laid_out_over(value, ranks) and not one.replicated:
            return one.state_of(local)
        value = value.full_tensor()
    return one.state_of(one.rows(value.detach()))


def _is_laid_out_over(value: DTensor, ranks: Sequence[int]) -> bool:
    """Whether these ranks have the rows, and maybe others copies of them."""
    *copies, last = value.placements
    coordinate = value.device_mesh.get_coordinate()
    if last != Shard(0) or any(not one.is_replicate() for one in copies) or coordinate is None:
        return False
    theirs: list[int] = value.device_mesh.mesh[tuple(coordinate[:-1])].tolist()
    return theirs == list(ranks)


def check_part(one: ParameterShard, key: str, value: DTensor) -> None:
    """Raises where a DTensor holds another rank's part, as where one rank has saved it for all.

    Raises:
        ValueError: it was made by another rank, or over ranks that have no such group here.
    """
    mesh, rank = value.device_mesh, dist.get_rank()
    coordinate = mesh.get_coordinate()
    maker = None if coordinate is None else int(mesh.mesh[tuple(coordinate)])
    if maker == rank and _has_groups(mesh):
        return
    ranks = mesh.mesh.flatten().tolist()
    whose = "of no rank" if maker is None else f"of rank {maker}"
    raise ValueError(
        f"rank {rank}: {WHAT}: expected this rank's part of {key!r} of parameter {one.name!r} in "
        f"the state, got that {whose} of the ranks {ranks}; nothing has changed. A state_dict() "
        "has the rows of the rank that made it. Save with dreamcomm.zero.save or "
        "torch.distributed.checkpoint on all ranks, or call consolidate_state_dict(to=...) on all "
        "ranks before one of them saves a state for all"
    )


def _has_groups(mesh: DeviceMesh) -> bool:
    """Whether the mesh's groups are those of this program, and not of one that saved it."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim in range(mesh.mesh.dim()):
        place = tuple(slice(None) if k == dim else at for k, at in enumerate(coordinate))
        try:
            ranks = dist.get_process_group_ranks(mesh.get_group(dim))
        except (KeyError, LookupError, RuntimeError, ValueError):
            return False
        if ranks != mesh.mesh[place].tolist():
            return False
    return True


def adopt_state(inner: Optimizer, one: ParameterShard, ranks: Sequence[int]) -> None:
    """Has tensors that a program has put into a parameter's state lie as this rank's rows do.

    Whole ones are cut, and others are copied where their dtype or layout differ.

    Raises:
        ValueError: a tensor has another shape than the parameter.
    """
    kept = inner.state.get(one.tensor)
    if not kept:
        return
    knows = type(inner) in PER_ELEMENT  # another class may keep any dtype and shape
    for key, value in kept.items():
        if not isinstance(value, Tensor):
            if knows and key == "step":
                kept[key] = torch.tensor(float(value), device="cpu")
        elif isinstance(value, DTensor) or value.shape != one.tensor.shape:
            if value.shape == one.parameter.shape:
                kept[key] = rows_of(one, value, ranks)
            elif value.numel() != 1 and knows:
                raise ValueError(
                    f"{WHAT}: expected shape {tuple(one.parameter.shape)} of {key!r} of parameter "
                    f"{one.name!r} in the state, or {tuple(one.tensor.shape)} for this rank's rows "
                    f"alone, got {tuple(value.shape)}"
                )
        elif value.dim() > 0:
            lies = _lies_as(value, one.tensor)
            if (knows and not lies) or (lies and not one.holds_state(value)):
                kept[key] = one.state_of(value)


def _lies_as(value: Tensor, rows: Tensor) -> bool:
    is_alike = value.dtype == rows.dtype and value.device == rows.device
    return is_alike and (value.stride() == rows.stride() or value.numel() == 0)
