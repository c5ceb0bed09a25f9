"""Keeps the copies of more bits equal to parameters that were changed between steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dreamcomm.zero.shards import ParameterShard

__all__ = ["note_versions", "refresh_masters"]


def refresh_masters(shards: Iterable[ParameterShard]) -> None:
    """Reads a copy anew where its parameter was written to since :func:`note_versions`.

    An element that still rounds to the parameter's keeps its bits. So weights and optimizer may be
    loaded in any order.
    """
    with torch.no_grad():
        for one in shards:
            if not one.has_master or one.version == one.parameter._version:
                continue
            rows = one.rows(one.parameter.detach())
            kept = one.tensor.to(rows.dtype) == rows
            one.tensor.copy_(torch.where(kept, one.tensor, rows.to(one.tensor.dtype)))


def note_versions(shards: Iterable[ParameterShard]) -> None:
    """Remembers that copies round to their parameters: at the end of a step."""
    for one in shards:
        if one.has_master:
            one.version = one.parameter._version
