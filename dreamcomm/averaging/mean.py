"""Means over the ranks of a group, through flat buffers that the ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.info import averages
from dreamcomm.memory import empty
from dreamcomm.ranks.pieces import runs, views

__all__ = ["average_", "flat_buffer", "start_mean"]

BUFFER_BYTES = 25 << 20


def average_(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replaces tensors by their means over the ranks. Collective.

    Takes up to 25 MiB of memory, or as much as the largest tensor.

    Args:
        tensors: of floating dtypes; on all ranks the same shapes in the same order.
        group: of the ranks.
    """
    if dist.get_world_size(group) == 1:
        return
    for run in runs(tensors, BUFFER_BYTES):
        members = [tensors[number] for number in run]
        flat = flat_buffer(sum(one.numel() for one in members), members[0])
        parts = views(flat, [one.shape for one in members])
        for part, one in zip(parts, members, strict=True):
            part.copy_(one.detach())
        start_mean(flat, group).wait()
        for part, one in zip(parts, members, strict=True):
            one.detach().copy_(part)


def flat_buffer(numel: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A flat tensor for a collective: on the CPU, in the heap that ranks share."""
    dtype = dtype or like.dtype
    if like.is_cpu:
        return empty(numel, dtype=dtype, device="cpu")
    return torch.empty(numel, dtype=dtype, device=like.device)


def start_mean(flat: Tensor, group: dist.ProcessGroup) -> Any:
    """Starts to replace a tensor by its mean over the ranks. Collective.

    dreamcomm adds in the order of ranks, 16 bits in float32, and rounds once. Other backends add
    what each rank has divided before.

    Returns:
        The collective's work; the tensor must not change before it is over.
    """
    if averages(flat, group):
        return dist.all_reduce(flat, dist.ReduceOp.AVG, group=group, async_op=True)
    flat.div_(dist.get_world_size(group))
    return dist.all_reduce(flat, group=group, async_op=True)
