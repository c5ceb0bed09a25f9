"""What stands for a tensor or a number while a forward is traced."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["IN_PLACE", "Constant", "OpenValue"]

_FOLLOWERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))

# What `x += y` and the like call. Tensors have no in-place form of `@=`.
IN_PLACE: tuple[Callable[..., Any], ...] = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
    *(operator.ilshift, operator.irshift),
)


class Constant:
    """A tensor that forward made or found outside the module; called, it returns it."""

    __name__ = "constant"

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self) -> Tensor:
        return self.value


class OpenValue(fx.Proxy):
    """A value in a trace; ``value[i] = x`` and ``value += x`` are recorded as changes in place.

    ``isinstance(value, Tensor)`` in forward raises, as the trace would follow the wrong branch.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        if not sys._getframe(1).f_code.co_filename.startswith(_FOLLOWERS):
            raise ValueError("it asks for the type of a value of the batch")
        return OpenValue

    def __getattr__(self, name: str) -> OpenAttribute:
        return OpenAttribute(self, name)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", _setitem, (self, index, value), {})


class OpenAttribute(OpenValue, fx.proxy.Attribute):
    """An attribute of a value; it becomes a node where it is used as something but a method."""


def _setitem(target: Any, index: Any, value: Any) -> None:
    target[index] = value


def _recorded(function: Callable[..., Any]) -> Callable[[OpenValue, Any], fx.Proxy]:
    def change(value: OpenValue, other: Any) -> fx.Proxy:
        return value.tracer.create_proxy("call_function", function, (value, other), {})

    return change


for _function in IN_PLACE:
    setattr(OpenValue, f"__{_function.__name__}__", _recorded(_function))
