"""The norm of a whole model's gradients, of which each rank has some stages'."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.buckets.found import engines_of
from dreamcomm.buckets.norm import values_of
from dreamcomm.buckets.protocol import ClipPart
from dreamcomm.buckets.sharded_norm import sharded_norm
from dreamcomm.pipeline.layout import Layout

__all__ = ["clip_whole_"]


def clip_whole_(
    trained: Sequence[nn.Parameter],
    counted_elsewhere: Sequence[nn.Parameter],
    layout: Layout,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scales this rank's gradients by the whole model's norm. Collective.

    Each rank finds the norm of its stages' gradients. The ranks' norms are put together in the
    order of the stages' ranks in float64, so every rank gets the same bits.
    """
    p = float(norm_type)
    left_out = {id(one) for one in counted_elsewhere}
    norms, values = [], []
    with torch.no_grad():
        engines, alone = engines_of(trained)
        for engine in engines:
            for part in engine.clip_parts():
                norm, scaled = _of_part(part, p, left_out)
                norms.append(norm)
                values += scaled
        gradients = [(one, one.grad) for one in alone if one.grad is not None]
        norms.append(_norm([g for one, g in gradients if id(one) not in left_out], p))
        values += [values_of(gradient) for _, gradient in gradients]
        mine = torch.tensor([_joined(norms, p)], dtype=torch.float64, device="cpu")
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(layout.group))]
        dist.all_gather(everyone, mine, group=layout.group)
        total = _joined([float(everyone[peer]) for peer in layout.peers], p)
        if error_if_nonfinite and not math.isfinite(total):
            raise RuntimeError(
                f"rank {dist.get_rank(layout.group)}: the {p:g}-norm of the gradients is {total}; "
                "they were not clipped. Without error_if_nonfinite=True they are"
            )
        device = values[0].device if values else torch.device("cpu")
        norm_before = torch.tensor(total, dtype=torch.float32, device=device)
        scale = torch.clamp(float(max_norm) / (norm_before + 1e-6), max=1.0)
        if values and (device.type != "cpu" or float(scale) != 1.0):
            torch._foreach_mul_(values, scale)
    return norm_before


def _of_part(part: ClipPart, p: float, left_out: set[int]) -> tuple[float, list[Tensor]]:
    if part.parts is None:
        gradients = [(one, one.grad) for one in part.parameters if one.grad is not None]
        norm = _norm([g for one, g in gradients if id(one) not in left_out], p)
        return norm, [values_of(gradient) for _, gradient in gradients]
    parts = part.parts()
    counted = [one for one in parts if id(one.parameter) not in left_out]
    norm = sharded_norm(counted, p, part.group)
    return norm, [one.elements for one in parts if one.elements.numel() > 0]


def _norm(gradients: Sequence[Tensor], p: float) -> float:
    return _joined(
        [float(torch.linalg.vector_norm(values_of(g).double(), p)) for g in gradients], p
    )


def _joined(norms: Sequence[float], p: float) -> float:
    """The norm of all elements, from the norms of parts. For p = 0 these count elements."""
    if any(math.isnan(one) for one in norms):
        return math.nan
    if math.isinf(p):
        return max(norms, default=0.0)
    if p == 0:
        return math.fsum(norms)
    if any(math.isinf(one) for one in norms):
        return math.inf
    return float(math.fsum(one**p for one in norms) ** (1.0 / p))
