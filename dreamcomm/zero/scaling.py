"""Loss scaling: one answer on all ranks to whether gradients have an infinity or NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from dreamcomm.zero.optimizer import ZeroOptimizer

__all__ = ["GradScaler", "shared_found_inf", "unscale_"]


class GradScaler(torch.amp.GradScaler):
    """torch's, for a ZeroOptimizer of any stage: all ranks skip the same steps.

    At stage 1 gradients are each rank's own when they are looked at, so torch's class would let
    ranks that found no infinity go on, with another scale. At stage 2 torch's class is right too.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        group = getattr(optimizer, "process_group", None)
        is_zero = hasattr(optimizer, "_note_unscaled") and group is not None
        if is_zero and optimizer.stage == 2:
            optimizer.reduce_gradients()  # a part that is local yet would be looked at alone
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not is_zero:
            return found
        device = optimizer.param_groups[0]["params"][0].device
        # A rank without gradients has looked at none.
        mine = found.setdefault(device, found_inf.to(device))
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
        optimizer._note_unscaled()
        return found


def shared_found_inf(optimizer: ZeroOptimizer) -> bool | None:
    """Whether any rank's gradients had an infinity or NaN; None without a GradScaler.

    Raises:
        RuntimeError: the scaler has looked at this rank's own gradients alone.
    """
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return None
    group = optimizer.process_group
    everywhere, optimizer._unscaled_everywhere = optimizer._unscaled_everywhere, False
    local = optimizer._reduces and dist.get_world_size(group) > 1 and not everywhere
    if local and (optimizer.stage == 1 or not optimizer._engine.compiled.agree_reduced()[0]):
        raise RuntimeError(
            f"rank {dist.get_rank(group)}: torch.amp.GradScaler has looked for infinities in this "
            "rank's own gradients, as they are not averaged yet, so ranks could skip different "
            "steps: use dreamcomm.zero.GradScaler, which has the same arguments"
        )
    return bool(found.item() > 0)


def unscale_(gradients: Sequence[Tensor | None], scale: Tensor) -> None:
    """Divides averages by the loss scale, as GradScaler.unscale_ does."""
    inverse = scale.double().reciprocal().float()
    present = [one for one in gradients if one is not None and one.numel() > 0]
    if present:
        torch._foreach_mul_(present, inverse)
