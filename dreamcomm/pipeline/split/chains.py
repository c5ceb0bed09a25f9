"""Parts of a chain of modules: an nn.Sequential, or a list of stages as in torch's pipelining."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

from dreamcomm.pipeline.split.part import StagePart

__all__ = ["chain_parts", "sequential_parts"]

Named = Sequence[tuple[str, nn.Module]]


def sequential_parts(children: Named, cuts: Sequence[int]) -> list[StagePart]:
    """Parts of an nn.Sequential: each child gets what the one before returned as one argument.

    Args:
        children: by name, in order.
        cuts: indices of the children at which parts 1.. begin.
    """
    return [
        StagePart(number, dict(group), partial(_run_sequential, number, group), _takes_none)
        for number, group in enumerate(_groups(children, cuts))
    ]


def chain_parts(stages: Named, cuts: Sequence[int]) -> list[StagePart]:
    """Parts of a list of stages: a tuple is spread to the next one's positional arguments.

    Args:
        stages: by name, in order. Each gets those keyword arguments that its forward has.
        cuts: indices of the stages at which parts 1.. begin.
    """
    parts = []
    for number, group in enumerate(_groups(stages, cuts)):
        filters = [_keyword_filter(module) for _, module in group]
        modules = [module for _, module in group]
        parts.append(
            StagePart(
                number, dict(group), partial(_run_chain, modules, filters), partial(_any, filters)
            )
        )
    return parts


def _groups(items: Named, cuts: Sequence[int]) -> list[Named]:
    return [items[begin:end] for begin, end in pairwise([0, *cuts, len(items)])]


def _run_sequential(number: int, group: Named, inputs: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs:
        raise TypeError(f"an nn.Sequential takes no keyword arguments, got {sorted(kwargs)}")
    if number == 0:
        if len(inputs) != 1:
            raise TypeError(f"an nn.Sequential takes 1 positional argument, got {len(inputs)}")
        (inputs,) = inputs
    for _, module in group:
        inputs = module(inputs)
    return inputs


def _run_chain(
    modules: list[nn.Module],
    filters: list[Callable[[str], bool]],
    inputs: Any,
    kwargs: dict[str, Any],
) -> Any:
    for module, accepts in zip(modules, filters, strict=True):
        own = {name: value for name, value in kwargs.items() if accepts(name)}
        inputs = module(*inputs, **own) if isinstance(inputs, tuple) else module(inputs, **own)
    return inputs


def _keyword_filter(module: nn.Module) -> Callable[[str], bool]:
    """Says which keyword arguments a module's forward has."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return _takes_all
    names = {
        one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    return names.__contains__


def _any(filters: list[Callable[[str], bool]], name: str) -> bool:
    return any(accepts(name) for accepts in filters)


def _takes_none(name: str) -> bool:
    return False


def _takes_all(name: str) -> bool:
    return True
