"""Finds what reduces the gradients of given parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dreamcomm.buckets.engine import BucketEngine

__all__ = ["engines_of"]


def engines_of(parameters: Iterable[nn.Parameter]) -> tuple[list[BucketEngine], list[nn.Parameter]]:
    """The engines that reduce the parameters' gradients, and the parameters that none reduces.

    Each engine once, in the order of its first parameter. Frozen parameters are in neither.
    """
    from dreamcomm import _C

    engines: dict[int, BucketEngine] = {}
    left = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        reducer = _C.GradientReducer.of(parameter)
        engine = None if reducer is None else reducer.owner()
        if isinstance(engine, BucketEngine):
            engines[id(engine)] = engine
        else:
            left.append(parameter)
    return list(engines.values()), left
