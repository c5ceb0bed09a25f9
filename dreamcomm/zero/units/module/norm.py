"""What a norm of a tree's gradients consists of."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from dreamcomm.buckets.layout import shard_layout
from dreamcomm.buckets.protocol import ClipPart, GradientPart
from dreamcomm.ranks.pieces import in_memory_order
from dreamcomm.zero.units.parameters.record import UnitParameter

if TYPE_CHECKING:
    from dreamcomm.zero.units.tree.tree import Tree

__all__ = ["clip_part"]


def clip_part(tree: Tree) -> ClipPart:
    """The gradients of all parameters, each of which counts once."""
    tree.check_shards("gradients are clipped")
    tree.follow()
    records, me = tree.records(), weakref.ref(tree)

    def parts() -> Sequence[GradientPart]:
        found = me()
        assert found is not None
        found.reduce_gradients()
        world = dist.get_world_size(found.shards)
        return [part for one in records if (part := _part(one, world)) is not None]

    return ClipPart([one.sharded for one in records], tree.shards, parts)


def _part(one: UnitParameter, world: int) -> GradientPart | None:
    """One parameter's gradient; None: no rank has one."""
    gradient = one.sharded.grad
    if gradient is None:
        return None
    elements = in_memory_order(gradient._local_tensor)  # type: ignore[attr-defined]
    numel = one.whole.numel()
    if one.is_replicated:
        ranges = [(0, numel)] + [(numel, 0)] * (world - 1)
    else:
        shape = tuple(one.whole.shape)
        pieces = [shard_layout([shape], world, rank)[0] for rank in range(world)]
        ranges = [(piece.offset, piece.numel) for piece in pieces]
    return GradientPart(elements, numel, ranges, one.sharded)
