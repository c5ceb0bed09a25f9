"""Refuses an optimizer step before all shards of a step are done."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dreamcomm.buckets.engine import BucketEngine

__all__ = ["refuse_early_steps"]


def refuse_early_steps(engine: BucketEngine) -> None:
    """Has steps of all optimizers that have the engine's parameters raise within a step's shards.

    It ends with the engine.
    """
    me = weakref.ref(engine)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = me()
        if found is None or not found.backward.missing_shards():
            return
        own = {id(one.parameter) for one in found.trained}
        if any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
            found.check_shards(f"{type(optimizer).__name__}.step() was called")

    weakref.finalize(engine, register_optimizer_step_pre_hook(before_step).remove)
