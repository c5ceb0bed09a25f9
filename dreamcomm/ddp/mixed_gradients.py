"""Refuses an optimizer step on gradients of which only a part was reduced.

A backward pass under ``no_sync()`` that adds to a gradient which is reduced already leaves a mix:
the first part is the average of all ranks, the second is this rank's own. Reduced once more it is
right; a step with it would make the ranks' weights differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["refuse_steps"]


def refuse_steps(mixed: Callable[[], Mapping[int, str]], rank: int) -> RemovableHandle:
    """Has steps of all optimizers raise that have a parameter whose gradient is a mix.

    Args:
        mixed: finds the parameters' names by their ``id``.
        rank: named in the error.

    Returns:
        A handle that ends it; not to be removed within a step.
    """

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = mixed()
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if id(parameter) in found:
                raise RuntimeError(
                    f"rank {rank}: the gradient of {found[id(parameter)]!r} is a mix: it was "
                    "reduced, and then a backward pass under no_sync() added this rank's part to "
                    "it. Reduce in the last backward pass before a step, not in an earlier one, or "
                    "call reduce_gradients() before the step"
                )

    return register_optimizer_step_pre_hook(before_step)
