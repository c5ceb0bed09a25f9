"""Gives all ranks the rows that others have stepped, where the ranks do not share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dreamcomm.ranks.pieces import in_memory_order, runs
from dreamcomm.zero.layout import shard_layout
from dreamcomm.zero.shards import ParameterShard

__all__ = ["gather_parameters"]

BYTES = 25 << 20  # of one message's whole result


def gather_parameters(shards: Sequence[ParameterShard], group: dist.ProcessGroup) -> None:
    """Fills in the other ranks' rows of the parameters. Collective.

    Args:
        shards: of the parameters that were stepped: the same on all ranks, in one order.
        group: its ranks have the other rows.
    """
    sharded = [one for one in shards if not one.replicated and one.parameter.numel() > 0]
    for run in runs([one.parameter for one in sharded], BYTES):
        _gather([sharded[number] for number in run], group)


def _gather(part: Sequence[ParameterShard], group: dist.ProcessGroup) -> None:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    shapes = [tuple(one.parameter.shape) for one in part]
    width = sum(piece.numel for piece in shard_layout(shapes, world, 0))  # no rank has more
    first = part[0].parameter
    mine = torch.zeros(width, dtype=first.dtype, device=first.device)
    flat = [in_memory_order(one.parameter) for one in part]
    for one, piece in zip(flat, shard_layout(shapes, world, rank), strict=True):
        mine[piece.place : piece.place + piece.numel] = one[piece.offset :][: piece.numel]
    every = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(every, mine, group=group)
    for other, received in enumerate(every):
        if other == rank:
            continue
        for one, piece in zip(flat, shard_layout(shapes, world, other), strict=True):
            one[piece.offset :][: piece.numel] = received[piece.place :][: piece.numel]
