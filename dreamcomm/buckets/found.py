"""Finds what reduces the gradients of given parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dreamcomm.buckets.engine import BucketEngine

__all__ = ["engine_of", "engines_of"]


def engine_of(parameter: nn.Parameter) -> BucketEngine | None:
    """The engine whose hooks are on the parameter, or None."""
    from dreamcomm import _C

    backward = _C.PassHooks.pass_of(parameter)
    engine = None if backward is None else backward.owner()
    return engine if isinstance(engine, BucketEngine) else None


def engines_of(parameters: Iterable[nn.Parameter]) -> tuple[list[BucketEngine], list[nn.Parameter]]:
    """The engines that reduce the parameters' gradients, and the parameters that none reduces.

    Each engine once, in the order of its first parameter. Frozen parameters are in neither.
    """
    engines: dict[int, BucketEngine] = {}
    left = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        engine = engine_of(parameter)
        if engine is None:
            left.append(parameter)
        else:
            engines[id(engine)] = engine
    return list(engines.values()), left
