"""Scales gradients so that their norm has a bound."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.buckets.norm import all_squares, powers, total, values_of
from dreamcomm.buckets.protocol import ClipPart
from dreamcomm.buckets.sharded_norm import sharded_powers

__all__ = ["clip_", "powers_of", "scale_"]


def clip_(part: ClipPart, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Scales the gradients of a part. Collective.

    Returns:
        The norm before, float32, of no dimension.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
    """
    with torch.no_grad():
        found, values = powers_of(part, float(norm_type))
        norm = torch.tensor(
            total(found, float(norm_type)), dtype=torch.float32, device=part.parameters[0].device
        )
        return scale_(values, norm, max_norm, norm_type, error_if_nonfinite, part.group)


def powers_of(
    part: ClipPart, p: float, left_out: Collection[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """What the norm of a part is made of, on all ranks of its group. Collective.

    Args:
        part: parameters whose gradients count once.
        p: of the norm.
        left_out: ids of parameters that count elsewhere.

    Returns:
        The numbers that :func:`dreamcomm.buckets.norm.total` takes, float64 and of one dimension,
        and this rank's tensors that are to be scaled, those of ``left_out`` too.
    """
    if part.parts is not None:
        parts = part.parts()
        counted = [one for one in parts if id(one.parameter) not in left_out]
        found = sharded_powers(counted, p, part.group)
        return found, [one.elements for one in parts if one.elements.numel() > 0]
    values = [(id(one), values_of(one.grad)) for one in part.parameters if one.grad is not None]
    own = [value for key, value in values if key not in left_out]
    found = all_squares(own, part.group) if p == 2.0 else powers(own, p)
    return found, [value for _, value in values]


def scale_(
    values: Sequence[Tensor],
    norm: Tensor,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    group: dist.ProcessGroup,
) -> Tensor:
    """Scales tensors by what brings the norm to ``max_norm``, and gives the norm in float32."""
    norm = norm.float()
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"rank {dist.get_rank(group)}: the {norm_type:g}-norm of the gradients is "
            f"{norm.item()}; they were not clipped. Without error_if_nonfinite=True they are"
        )
    scale = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    if values and (norm.device.type != "cpu" or float(scale) != 1.0):
        torch._foreach_mul_(list(values), scale)
    return norm
