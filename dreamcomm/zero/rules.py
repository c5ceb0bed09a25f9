"""The numbers of one optimizer step, as torch's single-tensor forms compute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dreamcomm._C import AdamRule, SgdRule

__all__ = ["KERNEL_CLASSES", "has_kernel", "rule_of", "state_names"]

# The classes whose step the compiled kernels make. A subclass may do anything else.
KERNEL_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def has_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the kernels make the optimizer's step: its class, its groups' options and dtypes."""
    if type(optimizer) not in KERNEL_CLASSES:
        return False
    dtypes = {one.dtype for group in optimizer.param_groups for one in group["params"]}
    if not dtypes <= {torch.float32, torch.float64}:
        return False
    for group in optimizer.param_groups:
        numbers = (group["lr"], group["weight_decay"], *group.get("betas", ()))
        if any(isinstance(one, torch.Tensor) for one in numbers):
            return False  # torch computes with them in their own dtype
        if group.get("capturable") or group.get("differentiable"):
            return False
    return True


def state_names(group: Mapping[str, Any]) -> tuple[str, ...]:
    """What the optimizer keeps of each element, in the kernels' order."""
    if "betas" in group:
        third = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("exp_avg", "exp_avg_sq", *third)
    return ("momentum_buffer",) if group["momentum"] != 0 else ()


def rule_of(group: Mapping[str, Any], step: int) -> AdamRule | SgdRule:
    """The rule of a parameter's step with this number, from 1 on.

    Args:
        group: of the parameter. ``fused``: Adam's square roots are correctly rounded, in the same
            pass over memory; else they are torch's, which on x86 MKL rounds otherwise.
        step: SGD: 1 where there is no momentum yet.
    """
    from dreamcomm import _C

    lr = float(group["lr"])
    decay = float(group["weight_decay"])
    if "betas" not in group:
        return _C.SgdRule(
            lr=lr,
            weight_decay=decay,
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
            first=step == 1,
        )
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decoupled = bool(group.get("decoupled_weight_decay", False))
    correction1 = 1 - beta1 ** float(step)
    correction2 = 1 - beta2 ** float(step)
    return _C.AdamRule(
        decay=1 - lr * decay if decoupled and decay != 0 else 1.0,
        weight_decay=0.0 if decoupled else decay,
        lerp_weight=1 - beta1,
        beta2=beta2,
        square_weight=1 - beta2,
        bias_correction2_sqrt=correction2**0.5,
        eps=float(group["eps"]),
        step_size=lr / correction1,
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group["maximize"]),
        torch_roots=not group.get("fused"),
    )
