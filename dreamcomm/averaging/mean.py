"""Means over the ranks of a group, through flat buffers that the ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.info import averages
from dreamcomm.memory import empty

__all__ = ["average_", "flat_buffer", "split", "start_mean"]

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
    for members in _batches(tensors):
        flat = flat_buffer(sum(one.numel() for one in members), members[0])
        parts = split(flat, members)
        for part, one in zip(parts, members, strict=True):
            part.copy_(one.detach())
        start_mean(flat, group).wait()
        for part, one in zip(parts, members, strict=True):
            one.detach().copy_(part)


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device, up to a buffer full."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for one in tensors:
        kinds.setdefault((one.dtype, one.device), []).append(one)
    for members in kinds.values():
        batch: list[Tensor] = []
        size = 0
        for one in members:
            if batch and size + one.nbytes > BUFFER_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(one)
            size += one.nbytes
        yield batch


def flat_buffer(numel: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A flat tensor for a collective: on the CPU, in the heap that ranks share."""
    dtype = dtype or like.dtype
    if like.is_cpu:
        return empty(numel, dtype=dtype, device="cpu")
    return torch.empty(numel, dtype=dtype, device=like.device)


def split(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor in the shapes of others."""
    parts = torch.split(flat, [one.numel() for one in tensors])
    return [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)]


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
