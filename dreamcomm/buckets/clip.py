"""Scales gradients so that their norm has a bound."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.buckets.norm import norm_of, values_of
from dreamcomm.buckets.protocol import ClipPart
from dreamcomm.buckets.sharded_norm import sharded_norm

__all__ = ["clip_"]


def clip_(part: ClipPart, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Scales the gradients of a part. Collective.

    Returns:
        The norm before, float32, of no dimension.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
    """
    device, group = part.parameters[0].device, part.group
    with torch.no_grad():
        norm, values = _norm(part, float(norm_type), device)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"rank {dist.get_rank(group)}: the {norm_type:g}-norm of the gradients is "
                f"{norm.item()}; they were not clipped. Without error_if_nonfinite=True they are"
            )
        scale = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
        if values and (device.type != "cpu" or float(scale) != 1.0):
            torch._foreach_mul_(values, scale.to(device))
    return norm


def _norm(part: ClipPart, p: float, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The norm, and this rank's tensors that are to be scaled."""
    if part.parts is not None:
        parts = part.parts()
        norm = torch.tensor(sharded_norm(parts, p, part.group), device=device, dtype=torch.float32)
        return norm, [one.elements for one in parts if one.elements.numel() > 0]
    gradients = [one.grad for one in part.parameters if one.grad is not None]
    values = [values_of(gradient) for gradient in gradients]
    if p == 2.0:
        found = norm_of(gradients, part.group)
        return torch.tensor(found, device=device, dtype=torch.float32), values
    return torch.nn.utils.get_total_norm(values, p).float(), values
