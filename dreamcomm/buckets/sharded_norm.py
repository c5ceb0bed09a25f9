"""What the norm is made of where each rank has a part of the gradients: the bits of whole ones.

A block of 4,096 elements that crosses from one rank's part into the next is summed by the rank that
has its first element. It gets the rest from the others: each rank sends what lies between the begin
of its part and the next block's begin::

    blocks      |    0    |    1    |    2    |
    rank 0      xxxxxxxxxxxxxxx                  sums block 0, and block 1 with y's fragment
    rank 1                     yyyyyyyyyyyyyyy   sends the fragment of block 1, sums block 2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.buckets.norm import BLOCK, block_squares, gathered, powers
from dreamcomm.buckets.protocol import GradientPart

__all__ = ["sharded_powers"]


def sharded_powers(parts: Sequence[GradientPart], p: float, group: dist.ProcessGroup) -> Tensor:
    """What the norm of all ranks' parts together is made of, on all ranks. Collective.

    Args:
        parts: the same gradients on all ranks, in one order, those that no rank has left out.
        p: of the norm. 2 has the bits of the norm of whole gradients, others do not.
        group: its ranks have the parts.
    """
    if not parts:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    device = parts[0].elements.device
    if p == 2.0:
        mine = _own_squares(parts, group)
        counts = [sum(_own_blocks(part, other) for part in parts) for other in range(world)]
    else:
        # Rank 0's part counts where all ranks have the same.
        held = [[part for part in parts if part.ranges[other][1] > 0] for other in range(world)]
        mine = powers([part.elements for part in held[rank]], p)
        counts = [len(of_rank) for of_rank in held]
    return torch.cat(gathered(mine.to(device), counts, group))


def _own_squares(parts: Sequence[GradientPart], group: dist.ProcessGroup) -> Tensor:
    """The sums of the blocks that begin in this rank's parts. Collective."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    fragments = gathered(
        torch.cat([_head(part, rank) for part in parts]),
        [sum(_head_length(part, other) for part in parts) for other in range(world)],
        group,
    )
    places = [0] * world
    sums = [torch.empty(0, dtype=torch.float64, device=parts[0].elements.device)]
    for part in parts:
        pieces = []
        for other in range(world):
            length = _head_length(part, other)
            pieces.append(fragments[other][places[other] : places[other] + length])
            places[other] += length
        sums += _sums(part, rank, pieces)
    return torch.cat(sums)


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
