"""Warns of gradients that were changed where the change means something else than it seems."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch.distributed as dist

from dreamcomm.buckets.engine import BucketEngine
from dreamcomm.zero.engine import WHAT
from dreamcomm.zero.shards import ParameterShard

__all__ = ["warn_of_changed"]


def warn_of_changed(engine: BucketEngine, shards: Sequence[ParameterShard]) -> None:
    """At stage 1 ``grad`` is this rank's own: what is written to it is averaged afterwards."""
    changed = [] if engine.shards is None else engine.shards.changed()
    if not any(changed):
        return
    names = [one.name for one, is_changed in zip(shards, changed, strict=True) if is_changed]
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    warnings.warn(
        f"{WHAT} on rank {dist.get_rank(engine.group)}: the gradients of {len(names)} parameters "
        f"({some}) were changed after backward(). They are this rank's own until step() averages "
        "them, so a clipping by their norm clips by another norm on each rank: call "
        "ZeroOptimizer.clip_grad_norm_() instead of torch.nn.utils.clip_grad_norm_()",
        stacklevel=4,
    )
