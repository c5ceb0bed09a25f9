"""Loss scaling: one answer on all ranks to whether gradients have an infinity or NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["GradScaler", "SkipsTogether", "unscale_"]


@runtime_checkable
class SkipsTogether(Protocol):
    """An optimizer whose ranks skip the same steps, and may hold different gradients before.

    Without it a scaler looks at this rank's gradients alone. That is right where they are the same
    on all ranks, as under a DistributedDataParallel, and where ranks step apart, as in LocalSGD.

    Attributes:
        process_group: of the ranks.
    """

    process_group: dist.ProcessGroup

    def before_unscale(self) -> None:
        """Reduces what can be looked at only when it is reduced. Collective."""

    def note_unscaled(self) -> None:
        """All ranks know whether any gradient has an infinity, and gradients are divided."""


class GradScaler(torch.amp.GradScaler):
    """torch's, for optimizers of all ways of training: ranks that step together skip together.

    It is needed for a ZeroOptimizer. At stage 1 gradients are each rank's own when they are looked
    at, so torch's class would let ranks that found no infinity go on, with another scale. At stage
    2 torch's class is right too, and under a DistributedDataParallel.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, SkipsTogether):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        optimizer.before_unscale()
        given: Any = optimizer
        found = super()._unscale_grads_(given, inv_scale, found_inf, allow_fp16)
        device = given.param_groups[0]["params"][0].device
        # A rank without gradients has looked at none.
        mine = found.setdefault(device, found_inf.to(device))
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=optimizer.process_group)
        optimizer.note_unscaled()
        return found


def unscale_(gradients: Sequence[Tensor | None], scale: Tensor) -> None:
    """Divides gradients by the loss scale, as GradScaler.unscale_ does."""
    inverse = scale.double().reciprocal().float()
    present = [one for one in gradients if one is not None and one.numel() > 0]
    if present:
        torch._foreach_mul_(present, inverse)
