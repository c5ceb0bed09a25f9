"""This rank's rows of gradients, as an optimizer and a norm take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dreamcomm.buckets.layout import shard_layout
from dreamcomm.buckets.protocol import GradientPart
from dreamcomm.ranks.pieces import in_memory_order
from dreamcomm.zero.shards import ParameterShard

__all__ = ["gradient_parts", "rows_of_gradients"]


def rows_of_gradients(shards: Sequence[ParameterShard]) -> list[Tensor | None]:
    """Copies of this rank's rows of whole gradients, flat, in the order of memory."""
    found: list[Tensor | None] = []
    for one in shards:
        whole = one.parameter.grad
        rows = None if whole is None else torch.empty_like(one.tensor).copy_(one.rows(whole))
        found.append(None if rows is None else in_memory_order(rows))
    return found


def gradient_parts(
    shards: Sequence[ParameterShard], gradients: Sequence[Tensor | None], world: int
) -> list[GradientPart]:
    """What a norm of sharded gradients consists of.

    Args:
        shards: of the parameters.
        gradients: this rank's elements of each, flat; None: no rank has one.
        world: number of ranks.
    """
    shapes = [tuple(one.parameter.shape) for one in shards]
    layouts = [shard_layout(shapes, world, rank) for rank in range(world)]
    found = []
    for number, (one, gradient) in enumerate(zip(shards, gradients, strict=True)):
        if gradient is None:
            continue
        numel = one.parameter.numel()
        ranges = [(of_rank[number].offset, of_rank[number].numel) for of_rank in layouts]
        if one.replicated:
            ranges = [(0, numel)] + [(numel, 0)] * (world - 1)
        found.append(GradientPart(gradient, numel, ranges, one.parameter))
    return found
