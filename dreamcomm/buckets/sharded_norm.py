"""The norm of gradients of which each rank has a part: the bits of :func:`norm_of` on whole ones.

A block of 4,096 elements that crosses from one rank's part into the next is summed by the rank that
has its first element. It gets the rest from the others: each rank sends what lies between the begin
of its part and the next block's begin::

    blocks      |    0    |    1    |    2    |
    rank 0      xxxxxxxxxxxxxxx                  sums block 0, and block 1 with y's fragment
    rank 1                     yyyyyyyyyyyyyyy   sends the fragment of block 1, sums block 2
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.buckets.norm import BLOCK, added_in_order, block_squares
from dreamcomm.buckets.protocol import GradientPart

__all__ = ["sharded_norm"]


def sharded_norm(
    parts: Sequence[GradientPart], norm_type: float, group: dist.ProcessGroup
) -> float:
    """The norm of all ranks' parts together. Collective.

    Args:
        parts: the same gradients on all ranks, in one order, those that no rank has left out.
        norm_type: the p of the norm. 2 has the bits of the norm of whole gradients, others do not.
        group: its ranks have the parts.
    """
    if not parts:
        return 0.0
    if float(norm_type) != 2.0:
        return _other_norm(parts, float(norm_type), group)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    device = parts[0].elements.device
    fragments = _exchange(
        torch.cat([_head(part, rank) for part in parts]),
        [sum(_head_length(part, other) for part in parts) for other in range(world)],
        group,
    )
    places = [0] * world
    mine: list[Tensor] = []
    for part in parts:
        pieces = []
        for other in range(world):
            length = _head_length(part, other)
            pieces.append(fragments[other][places[other] : places[other] + length])
            places[other] += length
        mine += _sums(part, rank, pieces)
    mine.append(torch.empty(0, dtype=torch.float64, device=device))
    counts = [[_own_blocks(part, other) for part in parts] for other in range(world)]
    sums = _exchange(torch.cat(mine), [sum(of_rank) for of_rank in counts], group)
    cut = [torch.split(one, of_rank) for one, of_rank in zip(sums, counts, strict=True)]
    ordered = [cut[other][k] for k in range(len(parts)) for other in range(world)]
    return math.sqrt(added_in_order(torch.cat(ordered)))


def _other_norm(parts: Sequence[GradientPart], p: float, group: dist.ProcessGroup) -> float:
    """Each rank's part once: of one that all have, rank 0's."""
    rank = dist.get_rank(group)
    counted = [part.elements for part in parts if part.ranges[rank][1] > 0]
    norms = [torch.linalg.vector_norm(one.double(), p) for one in counted if one.numel() > 0]
    device = parts[0].elements.device
    largest = math.isinf(p)
    if largest:
        found = (
            torch.stack(norms).max()
            if norms
            else torch.zeros((), dtype=torch.float64, device=device)
        )
    else:
        powers = [norm if p == 0 else norm.pow(p) for norm in norms]
        found = (
            torch.stack(powers).sum()
            if powers
            else torch.zeros((), dtype=torch.float64, device=device)
        )
    total = found.to(device).reshape(1)
    dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return float(total) if largest or p == 0 else float(total) ** (1.0 / p)


def _head_length(part: GradientPart, rank: int) -> int:
    """Elements of a rank's part before the first block that begins in it."""
    begin, count = part.ranges[rank]
    return min(-begin % BLOCK, count)


def _head(part: GradientPart, rank: int) -> Tensor:
    return part.elements[: _head_length(part, rank)].double()


def _own_blocks(part: GradientPart, rank: int) -> int:
    """Blocks that begin in a rank's part."""
    begin, count = part.ranges[rank]
    return -(-(begin + count) // BLOCK) - -(-begin // BLOCK)


def _sums(part: GradientPart, rank: int, fragments: Sequence[Tensor]) -> list[Tensor]:
    """The sums of this rank's blocks. ``fragments``: of this gradient, by rank."""
    blocks = _own_blocks(part, rank)
    if blocks == 0:
        return []
    own = part.elements[_head_length(part, rank) :]
    short = min(blocks * BLOCK, part.numel - (sum(part.ranges[rank]) - own.numel())) - own.numel()
    if short == 0:
        return [block_squares(own, 0, blocks)]
    rest: list[Tensor] = []
    for fragment in fragments[rank + 1 :]:
        rest.append(fragment[:short].to(own.dtype))
        short -= rest[-1].numel()
    last = torch.cat([own[(blocks - 1) * BLOCK :], *rest])
    whole = own[: (blocks - 1) * BLOCK]
    return [block_squares(whole, 0, blocks - 1), block_squares(last, 0, 1)]


def _exchange(mine: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's tensor of one dimension, whose lengths are known."""
    if len(lengths) == 1 or max(lengths) == 0:
        return [mine] * len(lengths)
    padded = torch.zeros(max(lengths), dtype=mine.dtype, device=mine.device)
    padded[: mine.numel()] = mine
    every = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(every, padded, group=group)
    return [one[:length] for one, length in zip(every, lengths, strict=True)]
