"""Tensors in memory that the ranks of this host share: collectives read and write them in place.

A tensor made here is an ordinary CPU tensor. It lies in the process's heap, one range that
every group of the process shows to its peers, so no step of its own is needed to register it,
and ranks may hold different ones. Where the heap is full the tensor lies in other memory and
collectives copy it, which ``dreamcomm.explain()`` tells. A forked child sees the same memory,
not a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["empty", "empty_like", "is_shared", "share_", "zeros"]

M = TypeVar("M", bound="nn.Module")


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Makes a tensor of undefined content, as :func:`torch.empty`, in the shared heap.

    Args:
        size: the shape, as numbers or as one sequence of them.
        dtype: None is torch's default dtype.

    Raises:
        ValueError: a negative size.
        RuntimeError: the system refuses the heap's address range.
    """
    from dreamcomm._compat import check_build

    check_build()
    from dreamcomm import _C
    from dreamcomm.backend import heap_bytes

    shape = _shape(size)
    if any(length < 0 for length in shape):
        raise ValueError(f"dreamcomm.empty: expected sizes from 0 on, got {tuple(shape)}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    size_of_heap = heap_bytes()
    if size_of_heap == 0:  # as where the heap is full
        return torch.empty(shape, dtype=dtype, device="cpu")
    return _C.allocate(shape.numel(), dtype, size_of_heap).view(shape)


def zeros(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Makes a tensor of zeros in the shared heap; see :func:`empty`."""
    return empty(*size, dtype=dtype).zero_()


def empty_like(tensor: Tensor) -> Tensor:
    """Makes a contiguous tensor of the same shape and dtype in the shared heap."""
    return empty(*tensor.shape, dtype=tensor.dtype)


def is_shared(tensor: Tensor) -> bool:
    """Whether the tensor lies in the heap that this process has now."""
    from dreamcomm._compat import check_build

    check_build()
    from dreamcomm import _C

    return _C.is_in_heap(tensor)


def share_(module: M) -> M:
    """Moves a module's CPU parameters, buffers and gradients into the shared heap, in place.

    The parameters stay the same objects, so optimizers and hooks keep their hold on them. Where
    a gradient is missing one of zeros is made, so that it lies in the heap from the first step
    on; keep it there with ``zero_grad(set_to_none=False)``. Tensors that share memory (tied
    weights) share it afterwards, too, if they are the same object.

    Returns:
        The module.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.device.type != "cpu":
                continue
            parameter.data = _moved(parameter.data)
            if parameter.requires_grad:
                gradient = parameter.grad
                parameter.grad = (
                    zeros(*parameter.shape, dtype=parameter.dtype)
                    if gradient is None
                    else _moved(gradient)
                )
        for buffer in module.buffers():
            if buffer.device.type == "cpu":
                buffer.data = _moved(buffer.data)
    return module


def _shape(size: tuple[int | Sequence[int], ...]) -> torch.Size:
    lengths: list[int] = []
    for part in size:
        if not isinstance(part, Sequence):
            lengths.append(part)
        elif len(size) == 1:
            lengths += part
        else:
            raise TypeError(f"expected sizes as numbers or as one sequence of them, got {size}")
    return torch.Size(lengths)


def _moved(tensor: Tensor) -> Tensor:
    return tensor if is_shared(tensor) else empty_like(tensor).copy_(tensor)
