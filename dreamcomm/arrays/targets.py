"""Where a call's result goes: into a new array, or into the caller's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from dreamcomm.arrays.extents import overlap
from dreamcomm.arrays.shapes import Shape
from dreamcomm.arrays.views import View, view_of

__all__ = ["Target", "target_of"]


class Target(NamedTuple):
    """Receives a result.

    Attributes:
        tensor: is written by the call.
        finish: called once after it; returns what the caller gets.
        view: of the caller's array; None: nobody else has the tensor's memory.
    """

    tensor: Tensor
    finish: Callable[[], Any]
    view: View | None = None


def target_of(given: View, array: Any, out: Any, *shapes: Shape) -> Target:
    """Makes a new array of the kind of ``array``, or checks the caller's ``out``.

    Args:
        given: the view of ``array``.
        array: as the caller gave it. If ``out`` is the same object, the call is in place.
        out: None for a new array.
        shapes: of the result; ``out`` may have any of them, and a new array has the first.

    Raises:
        TypeError, ValueError: ``out`` cannot be written, or differs in shape, dtype or device.
    """
    like = given.tensor
    if out is None:
        made = like.new_empty(shapes[0])
        return Target(made, partial(given.like, made))
    view = given if out is array else view_of(out, "out")
    tensor = view.tensor
    if view.why_constant:
        raise ValueError(f"out: {view.why_constant}, so it cannot receive the result")
    if tuple(tensor.shape) not in shapes:
        expected = " or ".join(str(one) for one in dict.fromkeys(shapes))
        raise ValueError(f"out: expected the shape {expected}, got {tuple(tensor.shape)}")
    if tensor.dtype != like.dtype:
        raise ValueError(f"out: expected elements of {_name(like)}, got {_name(tensor)}")
    if tensor.device != like.device:
        raise ValueError(f"out: expected an array on {like.device}, got one on {tensor.device}")
    if overlap(view):
        raise ValueError("out: some of its elements share memory, as in a broadcast array")
    return Target(tensor, partial(_written, view, out), view)


def _written(view: View, out: Any) -> Any:
    if view.written is not None:
        view.written()
    return out


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
