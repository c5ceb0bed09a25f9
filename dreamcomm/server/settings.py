"""Checks what users give to servers and workers, and reads parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DAMPING",
    "PlainGroup",
    "check_optimizer",
    "check_server",
    "check_worker",
    "checked_damping",
    "groups_of",
    "named",
    "of_these",
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


def named(params: Iterable[Any], who: str) -> tuple[list[str], list[Tensor]]:
    """The parameters that are trained, in order, with their names; "" for those without.

    Args:
        params: tensors, pairs of name and tensor, or groups of them, as torch's optimizers take.
        who: for errors.

    Raises:
        TypeError: an item is none of these.
        ValueError: there is none, or one comes twice.
    """
    names: list[str] = []
    tensors: list[Tensor] = []
    for group in groups_of(params):
        for item in group["params"]:
            name, tensor = item if isinstance(item, tuple) else ("", item)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{who}: expected parameters, got {type(tensor).__name__}")
            if tensor.is_meta:
                raise TypeError(
                    f"{who}: parameter {name or len(tensors)!r} is on the meta device, so it has "
                    "no values; make the model on another one, or call its to_empty()"
                )
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
    if isinstance(params, (set, frozenset)):
        raise TypeError("expected parameters in an order that is equal on all ranks, got a set")
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


class PlainGroup(dict[str, Any]):
    """A worker's group of parameters: what torch's optimizers have in theirs is the server's."""

    def __missing__(self, key: str) -> Any:
        raise _none(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in ("params", "param_names"):  # which torch gives it
            raise _none(key)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        return self[key]


def _none(key: str) -> KeyError:
    return KeyError(
        f"a Worker has no {key!r}: the optimizer is the server's. A schedule of the learning rate "
        "belongs over ParameterServer.optimizer, in serve(on_update=)"
    )


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
