"""One norm for all ways of training: the same bits however a parameter is sharded.

Squares are taken in float64 and summed over fixed blocks of 4,096 elements from each parameter's
start, in the order of memory; the sums of the blocks are added in the parameters' order. A block
has one owner, so ranks share the work and tell each other the sums, not the elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.ranks.pieces import in_memory_order, is_dense

__all__ = [
    "BLOCK",
    "added_in_order",
    "block_counts",
    "block_squares",
    "norm_of",
    "owned_blocks",
    "values_of",
]

BLOCK = 4096  # elements


def block_counts(numels: Sequence[int]) -> list[int]:
    """How many blocks each parameter has."""
    return [-(-numel // BLOCK) for numel in numels]


def owned_blocks(total: int, rank: int, world: int) -> tuple[int, int]:
    """The first block of a rank's share, and the first that is beyond it."""
    return total * rank // world, total * (rank + 1) // world


def norm_of(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> float:
    """The 2-norm of gradients that are equal on all ranks of the group. Collective.

    Args:
        gradients: dense or sparse, on one device type, in the same order on all ranks.
        group: its ranks share the work.
    """
    dense = [values_of(gradient) for gradient in gradients]
    counts = block_counts([one.numel() for one in dense])
    total = sum(counts)
    if total == 0:
        return 0.0
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    begin, end = owned_blocks(total, rank, world)
    widest = -(-total // world)
    device = dense[0].device
    mine = torch.zeros(widest, dtype=torch.float64, device=device)
    place = first = 0
    for gradient, count in zip(dense, counts, strict=True):
        low, high = max(begin, first) - first, min(end, first + count) - first
        if low < high:
            mine[place : place + high - low] = block_squares(gradient, low, high)
            place += high - low
        first += count
    if world == 1:
        return math.sqrt(added_in_order(mine[:total]))
    every = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(every, mine, group=group)
    shares = [owned_blocks(total, other, world) for other in range(world)]
    owned = [sums[: high - low] for sums, (low, high) in zip(every, shares, strict=True)]
    return math.sqrt(added_in_order(torch.cat(owned)))


def values_of(gradient: Tensor) -> Tensor:
    """The gradient's elements in the order of memory."""
    if gradient.is_sparse:
        return values_of(gradient._values())
    if gradient.is_complex():
        return values_of(torch.view_as_real(gradient.detach().resolve_conj()))
    return in_memory_order(gradient) if is_dense(gradient) else gradient.detach().reshape(-1)


def block_squares(flat: Tensor, low: int, high: int) -> Tensor:
    """The sums of the squares of a tensor's blocks from ``low`` to before ``high``."""
    if flat.device.type == "cpu":
        from dreamcomm import _C

        return _C.block_squares(flat, low, high)
    part = flat[low * BLOCK : high * BLOCK].double().square()
    padded = torch.nn.functional.pad(part, (0, (high - low) * BLOCK - part.numel()))
    return padded.view(high - low, BLOCK).sum(1)


def added_in_order(sums: Tensor) -> float:
    """The sum of float64 numbers, from the first to the last."""
    from dreamcomm import _C

    return _C.add_in_order(sums.cpu())
