"""Checks what users give to servers and workers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "DAMPING",
    "check_optimizer",
    "check_server",
    "check_worker",
    "checked_damping",
]


def _inverse(lag: int) -> float:
    return 1.0 / (1 + lag)


DAMPING: dict[str, Callable[[int], float]] = {"inverse": _inverse}


def check_server(
    staleness: int | None, push_scale: float, index: int, servers: int, workers: int | None
) -> None:
    """Raises ValueError or TypeError for numbers that make no server."""
    if staleness is not None and (isinstance(staleness, bool) or not isinstance(staleness, int)):
        raise TypeError(
            f"ParameterServer: expected staleness to be an int or None, got {staleness}"
        )
    if staleness is not None and staleness < 0:
        raise ValueError(
            f"ParameterServer: expected staleness to be at least 0, got {staleness}; 0 is "
            "synchronous, None is unbounded"
        )
    if not 0 < push_scale < math.inf:
        raise ValueError(f"ParameterServer: expected push_scale above 0, got {push_scale}")
    if staleness == 0 and push_scale != 1.0:
        raise ValueError(
            "ParameterServer: push_scale is for servers whose every push is a step; with "
            "staleness=0 gradients are averaged"
        )
    if servers < 1 or not 0 <= index < servers:
        raise ValueError(
            f"ParameterServer: expected an index from 0 to servers - 1, got index {index} of "
            f"{servers} servers"
        )
    if workers is not None and workers < 1:
        raise ValueError(f"ParameterServer: expected at least 1 worker, got {workers}")


def check_worker(servers: int, parameters: int, rank: int | None, timeout: float) -> None:
    """Raises ValueError for numbers that make no worker."""
    if not 1 <= servers <= parameters:
        raise ValueError(
            f"Worker: expected from 1 server to one for each of {parameters} parameters, got "
            f"{servers}"
        )
    if rank is not None and rank < 0:
        raise ValueError(f"Worker: expected a rank from 0 on, got {rank}")
    if not timeout > 0:
        raise ValueError(f"Worker: expected a timeout above 0 s, got {timeout}")


def checked_damping(
    damping: str | Callable[[int], float] | None, staleness: int | None
) -> Callable[[int], float] | None:
    """The damping as a function. Raises ValueError for one that is not known, or not used."""
    if damping is None:
        return None
    if staleness == 0:
        raise ValueError(
            "ParameterServer: damping needs staleness above 0 or None; with 0 no gradient is stale"
        )
    if callable(damping):
        return damping
    if damping not in DAMPING:
        raise ValueError(
            f"ParameterServer: expected damping to be a function of the lag or one of "
            f"{sorted(DAMPING)}, got {damping!r}"
        )
    return DAMPING[damping]


def check_optimizer(optimizer_class: Any) -> None:
    """Raises TypeError for what is no class of optimizers, ValueError for one that needs more."""
    if not isinstance(optimizer_class, type) or not issubclass(
        optimizer_class, torch.optim.Optimizer
    ):
        raise TypeError(
            f"ParameterServer: expected a class of torch.optim, got {optimizer_class!r}; its "
            "arguments follow as keywords"
        )
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"ParameterServer: {optimizer_class.__name__} computes the loss again in its step, "
            "which a server cannot; choose one that steps with gradients alone"
        )
