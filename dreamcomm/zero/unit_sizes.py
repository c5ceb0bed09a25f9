"""The units of a module that is not sharded yet, and their sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["bytes_in_use", "dtype_of", "units_of"]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
KEPT_UNITS = 2  # the one that computes, and the next


def units_of(given: nn.Module | Iterable[Tensor]) -> list[Sequence[Tensor]]:
    """Parameters by unit, in the module's order. A tied one is in each unit that uses it."""
    if isinstance(given, nn.Module):
        units = list(_units_in(given))
    elif isinstance(given, Iterable) and not isinstance(given, (Tensor, str)):
        units = [[], *([one] for one in given)]
    else:
        raise TypeError(
            f"estimate: expected a torch.nn.Module or its parameters, got {type(given).__name__}"
        )
    for one in (one for unit in units for one in unit):
        if not isinstance(one, Tensor):
            raise TypeError(
                f"estimate: expected parameters to be tensors, got {type(one).__name__}"
            )
        if nn.parameter.is_lazy(one):
            raise ValueError(
                "estimate: expected parameters with shapes, got one that is not initialized yet; "
                "run the module once"
            )
    return units


def _units_in(module: nn.Module) -> Iterable[Sequence[Tensor]]:
    yield list(module.parameters(recurse=False))
    for child in module.children():
        inside = not isinstance(module, CONTAINERS) and any(
            isinstance(inner, CONTAINERS) for inner in child.modules()
        )
        if isinstance(child, CONTAINERS) or inside:
            yield from _units_in(child)
        else:
            yield list(child.parameters())


def bytes_in_use(units: Sequence[Sequence[Tensor]], param_dtype: torch.dtype | None) -> int:
    """Bytes of whole parameters in use. What several units use is the root's, the first one."""
    users = Counter(id(one) for unit in units for one in unit)
    tied = {id(one): one for unit in units for one in unit if users[id(one)] > 1}
    root, *others = [[one for one in unit if id(one) not in tied] for unit in units]
    used = sorted(_nbytes(unit, param_dtype) for unit in others)[-KEPT_UNITS:]
    return _nbytes([*root, *tied.values()], param_dtype) + sum(used)


def dtype_of(parameter: Tensor, param_dtype: torch.dtype | None) -> torch.dtype:
    """The type of a parameter that is computed in ``param_dtype``, or in its own."""
    return (param_dtype if parameter.is_floating_point() else None) or parameter.dtype


def _nbytes(parameters: Iterable[Tensor], param_dtype: torch.dtype | None) -> int:
    return sum(one.numel() * dtype_of(one, param_dtype).itemsize for one in parameters)
