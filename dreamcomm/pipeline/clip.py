"""Clips by the norm of a whole model's gradients, of which each rank has some stages'."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dreamcomm.buckets.clip import powers_of, scale_
from dreamcomm.buckets.found import engines_of
from dreamcomm.buckets.norm import gathered, powers, total, values_of
from dreamcomm.pipeline.layout import Layout
from dreamcomm.ranks.agree import gather_numbers

__all__ = ["clip_whole_"]


def clip_whole_(
    trained: Sequence[nn.Parameter],
    counted_elsewhere: Sequence[nn.Parameter],
    layout: Layout,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scales this rank's gradients by the whole model's norm: the bits of one process. Collective.

    Each rank finds what the norm of its stages' gradients is made of, and the ranks of the mesh
    tell each other.
    """
    p = float(norm_type)
    left_out = {id(one) for one in counted_elsewhere}
    with torch.no_grad():
        engines, alone = engines_of(trained)
        own = [(id(one), values_of(one.grad)) for one in alone if one.grad is not None]
        found = [powers([value for key, value in own if key not in left_out], p)]
        values = [value for _, value in own]
        for part in [part for engine in engines for part in engine.clip_parts()]:
            numbers, scaled = powers_of(part, p, left_out)
            found.append(numbers)
            values += scaled
        mine = torch.cat([one.cpu() for one in found])
        lengths = gather_numbers(layout.group, [mine.numel()], mine.device)
        every = gathered(mine, [length for (length,) in lengths], layout.group)
        norm = torch.tensor(
            total(torch.cat([every[peer] for peer in layout.peers]), p),
            dtype=torch.float32,
            device=values[0].device if values else torch.device("cpu"),
        )
        return scale_(values, norm, max_norm, norm_type, error_if_nonfinite, layout.group)
