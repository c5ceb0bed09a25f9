"""Keeps the copies of more bits equal to parameters that were changed between steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dreamcomm.zero.shards import ParameterShard

__all__ = ["masters_of", "refresh_masters"]


def refresh_masters(shards: Iterable[ParameterShard]) -> None:
    """Reads a copy anew where it does not round to the parameter, which somebody has written to.

    All elements are compared, as a write through ``.data`` counts no version. An element that
    rounds to the parameter's keeps its bits. So weights and optimizer may be loaded in any order.
    """
    with torch.no_grad():
        for one in shards:
            if not one.has_master:
                continue
            rows = one.rows(one.parameter.detach())
            kept = one.tensor.to(rows.dtype) == rows
            if not bool(kept.all()):
                one.tensor.copy_(torch.where(kept, one.tensor, rows.to(one.tensor.dtype)))


def masters_of(shards: Sequence[ParameterShard]) -> list[Tensor | None]:
    """The copies of more bits, where there are such."""
    return [one.tensor if one.has_master else None for one in shards]
