"""Gradient bucketing: many tensors into one flat buffer and back, scaled and cast in one pass.

Tensors and buffers are float32, float64, bfloat16 or float16, in any pair, contiguous, and all on
the CPU or all on one CUDA device. Arithmetic is float32's, or float64's if either side is float64,
and is rounded once, to nearest even; a NaN becomes the quiet one. Equal inputs give equal bits, on
every machine and device and however the elements are cut into tensors.

On a CUDA device both run on the current stream and return before they are done: one kernel, and a
small second one to inspect. They can be captured in a graph, where each 2000 tensors take a kernel.

Both functions write as under :class:`torch.no_grad`: nothing is recorded for a backward pass,
also if a tensor requires a gradient, and autograd learns that the memory has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Transfer", "pack", "unpack"]


@dataclass(frozen=True)
class Transfer:
    """The result of a pass over a bucket.

    Attributes:
        bytes_read: bytes of tensors, buffers and residuals that were read, as counted by the pass.
        bytes_written: bytes that were written, counted in the same way.
        squared_norm: the sum of the squares of all elements written, added in float64 in an
            order that depends only on their number; None if it was not requested. On a CUDA device
            it is a float64 tensor of no dimension on that device, and the call does not wait for
            it.
        finite: whether no element written is infinite or NaN; None if it was not requested. On a
            CUDA device it is a bool tensor of no dimension on that device.
    """

    bytes_read: int
    bytes_written: int
    squared_norm: float | Tensor | None = None
    finite: bool | Tensor | None = None


def pack(
    tensors: Sequence[Tensor], out: Tensor, *, scale: float = 1.0, residual: Tensor | None = None
) -> Transfer:
    """Writes the tensors' elements one after another into ``out``: ``cast(x * scale)``.

    float32 into bfloat16 moves 6 bytes per element, with a residual 14.

    Args:
        tensors: tensors of any shapes and one dtype.
        out: a tensor of any shape, with as many elements as the tensors have together.
        scale: the factor of each element before it is cast.
        residual: float32, with as many elements as ``out``. It is added before the cast, and
            receives the rounding error of the cast, to be sent with the next call (error feedback;
            Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, "Error
            feedback fixes SignSGD"). An error that is not finite becomes 0.

    Raises:
        ValueError: dtypes, shapes, devices or layouts do not fit, or memory overlaps. A tensor
            may be at its own place in ``out`` if it has the same dtype. Nothing was written.
        TypeError: an argument is of another type.
    """
    from dreamcomm._torch.build_check import check_build

    check_build()
    from dreamcomm import _C

    listed = _listed("pack", tensors)
    _require_tensor("pack", "out", out)
    if residual is not None:
        _require_tensor("pack", "residual", residual)
    return Transfer(*_C.pack(listed, out, scale, residual))


def unpack(
    buffer: Tensor,
    tensors: Sequence[Tensor],
    *,
    divisor: int = 1,
    factor: float = 1.0,
    inspect: bool = False,
) -> Transfer:
    """Writes the buffer's elements into the tensors: ``cast(x / divisor * factor)``.

    bfloat16 into float32 moves 6 bytes per element; ``inspect`` adds none.

    Args:
        buffer: a tensor of any shape, with as many elements as the tensors have together.
        tensors: tensors of any shapes and one dtype.
        divisor: at least 1; the number of ranks turns a sum into an average.
        factor: the factor of each quotient, such as the inverse of a loss scale.
        inspect: also find ``squared_norm`` and ``finite`` of the written elements.

    Raises:
        ValueError: as :func:`pack`, or the divisor is below 1. Nothing was written.
        TypeError: an argument is of another type.
    """
    from dreamcomm._torch.build_check import check_build

    check_build()
    from dreamcomm import _C

    listed = _listed("unpack", tensors)
    _require_tensor("unpack", "buffer", buffer)
    read, written, squares, finite = _C.unpack(buffer, listed, divisor, factor, inspect)
    return Transfer(read, written, squares, finite) if inspect else Transfer(read, written)


def _listed(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{call}: expected 'tensors' to be a list of tensors, got one; write [it]")
    listed = list(tensors)
    for number, tensor in enumerate(listed):
        _require_tensor(call, f"tensors[{number}]", tensor)
    return listed


def _require_tensor(call: str, name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{call}: expected {name!r} to be a tensor, got {type(value).__name__}")
