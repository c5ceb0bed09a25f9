"""Checks what users give to servers and workers, and reads parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["DAMPING", "check_server", "checked_damping", "groups_of", "named"]


def _inverse(lag: int) -> float:
    return 1.0 / (1 + lag)


DAMPING: dict[str, Callable[[int], float]] = {"inverse": _inverse}


def check_server(
    staleness: int | None, push_scale: float, index: int, servers: int, workers: int | None
) -> None:
    """Raises ValueError for numbers that make no server."""
    if staleness is not None and (isinstance(staleness, bool) or int(staleness) != staleness):
        raise ValueError(
            f"ParameterServer: expected staleness to be an int or None, got {staleness}"
        )
    if staleness is not None and staleness < 0:
        raise ValueError(
            f"ParameterServer: expected staleness to be at least 0, got {staleness}; 0 is "
            "synchronous, None is unbounded"
        )
    if not push_scale > 0:
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


def named(params: Iterable[Any], who: str) -> tuple[list[str], list[Tensor]]:
    """The parameters that are trained, in order, with their names; "" for those without.

    Args:
        params: tensors, pairs of name and tensor, or groups of them, as torch's optimizers take.
        who: for errors.

    Raises:
        TypeError: an item is none of these.
        ValueError: there is none, or one comes twice.
    """
    names, tensors = [], []
    for group in groups_of(params):
        for item in group["params"]:
            name, tensor = item if isinstance(item, tuple) else ("", item)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{who}: expected parameters, got {type(tensor).__name__}")
            if tensor.requires_grad:
                names.append(name)
                tensors.append(tensor)
    if not tensors:
        raise ValueError(f"{who}: expected parameters that require gradients, got none")
    if len({id(one) for one in tensors}) != len(tensors):
        raise ValueError(f"{who}: a parameter is given twice")
    return names, tensors


def groups_of(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters as the groups of a torch optimizer."""
    if isinstance(params, Tensor):
        raise TypeError("expected an iterable of parameters, got one tensor")
    items = list(params)
    if not items or not isinstance(items[0], dict):
        return [{"params": items}]
    return [
        {
            **group,
            "params": [group["params"]]
            if isinstance(group["params"], Tensor)
            else list(group["params"]),
        }
        for group in items
    ]


def of_these(groups: list[dict[str, Any]], wanted: Iterable[Tensor]) -> list[dict[str, Any]]:
    """The groups with some of their parameters only; those that have none left are dropped."""
    ids = {id(one) for one in wanted}

    def is_wanted(item: Any) -> bool:
        return id(item[1] if isinstance(item, tuple) else item) in ids

    cut = [{**group, "params": [p for p in group["params"] if is_wanted(p)]} for group in groups]
    return [group for group in cut if group["params"]]


def check_optimizer(optimizer_class: Any) -> None:
    """Raises TypeError for what is no class of optimizers."""
    if not isinstance(optimizer_class, type) or not issubclass(
        optimizer_class, torch.optim.Optimizer
    ):
        raise TypeError(
            f"ParameterServer: expected a class of torch.optim, got {optimizer_class!r}; its "
            "arguments follow as keywords"
        )
