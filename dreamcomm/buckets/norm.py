"""One norm for all ways of training: the same bits however gradients are shared out among ranks.

Squares are taken in float64 and summed over fixed blocks of 4,096 elements from each parameter's
start, in the order of memory. The sums of the blocks are added exactly, and rounded once
(``math.fsum``), so neither the order of parameters nor the ranks that have them count. A block has
one owner: ranks share the work and tell each other the sums, not the elements.

The sum of powers of another norm is made in the same way of one number for each gradient.
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
    "all_squares",
    "block_counts",
    "block_squares",
    "gathered",
    "norm_of",
    "owned_blocks",
    "powers",
    "total",
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
    return total(all_squares([values_of(one) for one in gradients], group), 2.0)


def all_squares(flat: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """The sums of all blocks of flat tensors that are equal on all ranks: float64. Collective."""
    counts = block_counts([one.numel() for one in flat])
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    begin, end = owned_blocks(sum(counts), rank, world)
    mine = [torch.empty(0, dtype=torch.float64, device=flat[0].device if flat else "cpu")]
    first = 0
    for one, count in zip(flat, counts, strict=True):
        low, high = max(begin, first) - first, min(end, first + count) - first
        if low < high:
            mine.append(block_squares(one, low, high))
        first += count
    shares = [owned_blocks(sum(counts), other, world) for other in range(world)]
    every = gathered(torch.cat(mine), [high - low for low, high in shares], group)
    return torch.cat(every)


def powers(flat: Sequence[Tensor], p: float) -> Tensor:
    """What the norm of flat tensors is made of, on this rank alone: float64, of one dimension."""
    held = [one for one in flat if one.numel() > 0]
    if not held:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    if p == 2.0:
        return torch.cat(
            [block_squares(one, 0, n) for one, n in zip(held, _blocks(held), strict=True)]
        )
    norms = torch.stack([torch.linalg.vector_norm(one.double(), p) for one in held])
    return norms if math.isinf(p) or p == 0 else norms.pow(p)


def total(parts: Tensor, p: float) -> float:
    """The norm of the numbers that :func:`powers` and :func:`all_squares` have found."""
    numbers = parts.tolist()
    if math.isinf(p):
        return float(parts.max() if p > 0 else parts.min()) if numbers else 0.0
    try:
        found = math.fsum(numbers)
    except OverflowError:  # numbers are not negative
        return math.inf
    if p == 2.0:
        return math.sqrt(found)
    if p == 0:
        return found
    try:
        return float(found ** (1.0 / p))
    except (OverflowError, ZeroDivisionError):  # of a p below 1
        return math.inf


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


def gathered(mine: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's tensor of one dimension, whose lengths are known. Collective."""
    if len(lengths) == 1 or max(lengths) == 0:
        return [mine] * len(lengths)
    padded = torch.zeros(max(lengths), dtype=mine.dtype, device=mine.device)
    padded[: mine.numel()] = mine
    every = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(every, padded, group=group)
    return [one[:length] for one, length in zip(every, lengths, strict=True)]


def _blocks(flat: Sequence[Tensor]) -> list[int]:
    return block_counts([one.numel() for one in flat])
