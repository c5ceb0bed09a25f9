"""How many bytes of state an optimizer keeps of a parameter, found by a step of a small one."""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["StateBytes", "state_of"]

# Options of a step's code, not of what the optimizer holds. Some refuse parameters on a CPU.
CODE_OPTIONS = {"foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True)
class StateBytes:
    """What an optimizer holds for a parameter.

    Attributes:
        tensors: number of tensors of the parameter's shape, in the dtype that is stepped.
        fixed: bytes an element in other dtypes.
        counters: bytes of scalars.
    """

    tensors: int
    fixed: float
    counters: int


def state_of(optimizer: object, options: dict[str, object]) -> StateBytes:
    """The bytes that an optimizer keeps: a class, an instance, or a number of bytes an element.

    Raises:
        TypeError: it is none of them.
        ValueError: as :func:`dreamcomm.zero.estimate`.
    """
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        if not (math.isfinite(optimizer) and optimizer >= 0):
            raise ValueError(
                f"estimate: expected at least 0 bytes of state an element, got {optimizer}"
            )
        if options:
            raise ValueError(
                "estimate: expected no optimizer_kwargs with a number of bytes, got "
                f"{sorted(options)}"
            )
        return StateBytes(0, optimizer, 0)
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer)
        # Defaults hold more than the constructor takes: AdamW's have decoupled_weight_decay.
        taken = inspect.signature(kind).parameters
        options = {k: v for k, v in optimizer.defaults.items() if k in taken} | options
    elif isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        kind = optimizer
    else:
        raise TypeError(
            "estimate: expected optimizer to be a class of torch.optim, an instance, or bytes an "
            f"element, got {optimizer!r}"
        )
    kept = tuple(sorted((k, v) for k, v in options.items() if k not in CODE_OPTIONS))
    try:
        hash(kept)
    except TypeError:  # a list, say
        return _tried.__wrapped__(kind, kept)
    return _tried(kind, kept)  # type: ignore[arg-type]  # mypy compares Optimizer's __hash__


@functools.lru_cache(maxsize=64)
def _tried(kind: type[torch.optim.Optimizer], options: tuple[tuple[str, Any], ...]) -> StateBytes:
    """Steps a small parameter once. It is float64, to tell its dtype from fixed ones."""
    held: dict[str, object] = {}
    with torch.device("cpu"):
        parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64, device="cpu"))
        parameter.grad = torch.ones_like(parameter)
        try:
            tried = kind([parameter], **dict(options))
            tried.step()
            held = tried.state[parameter]
        except Exception as error:
            raise ValueError(
                f"estimate: expected an optimizer that steps one dense parameter, got "
                f"{kind.__name__}, which raised: {error}; give its bytes an element instead"
            ) from error
    tensors = fixed = counters = 0
    for name, value in held.items():
        if not isinstance(value, Tensor):
            continue
        if value.ndim == 0:
            counters += value.element_size()
        elif value.shape != parameter.shape:
            raise ValueError(
                f"estimate: expected state of the parameter's shape, got {kind.__name__} with "
                f"{name!r} of shape {tuple(value.shape)} for {tuple(parameter.shape)}; give its "
                "bytes an element instead"
            )
        elif value.dtype == parameter.dtype:
            tensors += 1
        else:
            fixed += value.element_size()
    return StateBytes(tensors, fixed, counters)
