"""Refuses an optimizer step on gradients of which only a part was reduced.

A backward pass under ``no_sync()`` that adds to a gradient which is reduced already leaves a mix:
the first part is the average of all ranks, the second is this rank's own. Reduced once more it is
right; stepped with, it is wrong on every rank in another way, and nobody would see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["refuse_step"]


def refuse_step(
    mixed: Mapping[str, torch.nn.Parameter], *, rank: int, is_over: Callable[[], bool]
) -> None:
    """Has the next step of an optimizer with these parameters raise, unless that is over.

    It is over for a parameter when its gradient was cleared, and for all when ``is_over`` says that
    gradients have been reduced again.
    """
    found = {
        id(parameter): (name, parameter.grad, parameter.grad._version)
        for name, parameter in mixed.items()
        if parameter.grad is not None
    }

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_over():
            handle.remove()
            return
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            name, gradient, version = found.get(id(parameter), ("", None, 0))
            if gradient is None or parameter.grad is not gradient:
                continue
            if gradient._version == version:
                raise RuntimeError(
                    f"rank {rank}: the gradient of {name!r} is a mix: it was reduced, and then a "
                    "backward pass under no_sync() added this rank's part to it. Reduce in the "
                    "last backward pass before a step, not in an earlier one, or call "
                    "reduce_gradients() before the step"
                )

    handle = register_optimizer_step_pre_hook(before_step)
