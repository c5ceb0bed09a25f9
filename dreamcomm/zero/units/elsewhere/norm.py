"""The norm of gradients that are DTensors, and scaling them by it.

A rank sums the powers of its own shards in float64. Ranks tell each other the sums along the mesh
dimensions that parameters are sharded on, and add them in the order of ranks. Replicas have the
same gradients, and so the same sums::

    Replicate      rank 0: shard 0 --- rank 1: shard 1     both have |shard 0|^p + |shard 1|^p
        |
                   rank 2: shard 0 --- rank 3: shard 1     these too
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["clip_", "total_norm"]


def clip_(
    parameters: Sequence[DTensor],
    device: torch.device,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scales the gradients of parameters so that their norm is ``max_norm`` at most. Collective.

    Args:
        parameters: the same on all ranks, in one order.
        device: that their groups have a backend for.
        max_norm: above zero.
        norm_type: the p of the norm.
        error_if_nonfinite: whether to raise rather than scale by a norm that is not finite.

    Returns:
        The norm before, float32, of no dimension, on ``device``, the same on all ranks.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set. On all ranks.
    """
    norm = total_norm(parameters, device, norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"rank {dist.get_rank()}: the {norm_type:g}-norm of the gradients is {norm.item()}; "
            "they were not clipped. Without error_if_nonfinite=True they are"
        )
    scale = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in (one.grad for one in parameters):
        if isinstance(gradient, DTensor):
            local = gradient.to_local()
            by_device.setdefault(local.device, []).append(local)
    for where, locals_ in by_device.items():
        torch._foreach_mul_(locals_, scale.to(where))
    return norm


def total_norm(parameters: Sequence[DTensor], device: torch.device, p: float) -> Tensor:
    """The norm of the gradients of parameters, as of :func:`clip_`. Collective."""
    shards: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    for one in parameters:
        held = shards.setdefault((one.device_mesh, _sharded_dimensions(one)), [])
        if isinstance(one.grad, DTensor):
            held.append(_placed(one.grad, one).to_local())
    sums = []
    for (mesh, dimensions), held in shards.items():
        found = _power(held, p, device)
        for dimension in dimensions:
            found = _together(_everyones(found, mesh.get_group(dimension)), p)
        sums.append(found)
    power = _together(torch.stack(sums), p) if sums else torch.zeros((), device=device)
    return (power if p == 0 or math.isinf(p) else power.pow(1.0 / p)).float()


def _sharded_dimensions(one: DTensor) -> tuple[int, ...]:
    """The mesh dimensions along which ranks have different elements."""
    return tuple(k for k, placed in enumerate(one.placements) if not placed.is_replicate())


def _placed(gradient: DTensor, parameter: DTensor) -> DTensor:
    """A gradient in the shards of its parameter."""
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def _power(shards: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """The sum of the powers of all elements, or their largest or smallest: float64."""
    held = [one.abs() if one.is_complex() else one for one in shards if one.numel() > 0]
    if not held:
        nothing = math.inf if p == -math.inf else 0.0
        return torch.full((), nothing, dtype=torch.float64, device=device)
    found = torch._foreach_norm(held, p, dtype=torch.float64)
    norms = torch.stack([one.to(device) for one in found])
    return _together(norms if p == 0 or math.isinf(p) else norms.pow(p), p)


def _together(parts: Tensor, p: float) -> Tensor:
    if math.isinf(p):
        return parts.max() if p > 0 else parts.min()
    return parts.sum()


def _everyones(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A number of each rank, by rank. Collective."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return torch.stack(every)
