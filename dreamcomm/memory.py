"""Tensors in memory that the ranks of this host share: collectives read and write them in place.

A tensor made here is an ordinary CPU tensor in the process's heap. The heap is one range that
every group of the process shares with its peers. So tensors need no registration, and ranks may
hold different ones. If the heap is full, or the system provides none, the tensor is in other memory
and collectives copy it; ``dreamcomm.explain()`` says so. A tensor that is resized gets new memory
from the heap. A forked child sees the same memory, not a copy.

On a GPU the memory belongs to one group. The group's option ``cuda`` must be "dreamcomm", and
``cuda_heap_bytes`` sets the size of the memory. All ranks of the group have to take part in its
first call for a tensor on the GPU, whether an allocation or a collective. A tensor there that is
resized beyond its storage moves into torch's own memory, which collectives copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn

__all__ = ["empty", "empty_like", "is_shared", "share_", "zeros"]

M = TypeVar("M", bound="nn.Module")


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Makes a tensor of undefined content in the shared heap, like :func:`torch.empty`.

    Args:
        size: the shape, as numbers or as one sequence of them.
        dtype: None is torch's default dtype.
        device: None is the CPU.
        group: the group whose memory on the GPU is used; None is the default group.

    Raises:
        ValueError: a negative size; a device whose tensors the group hands to NCCL.
        RuntimeError: the process may open no more files.
    """
    from dreamcomm._torch.build_check import check_build

    check_build()
    shape = _shape(size)
    if any(length < 0 for length in shape):
        raise ValueError(f"dreamcomm.empty: expected sizes from 0 on, got {tuple(shape)}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    where = torch.device("cpu" if device is None else device)
    if where.type == "cpu":
        return _on_cpu(shape, dtype)
    from dreamcomm._torch.groups import backend_of

    made = backend_of(group).allocate_tensor(shape.numel(), dtype=dtype, device=where)
    return made.view(shape)


def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Makes a tensor of zeros in the shared heap; see :func:`empty`."""
    return empty(*size, dtype=dtype, device=device, group=group).zero_()


def empty_like(tensor: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Makes a contiguous tensor of the same shape, dtype and device; see :func:`empty`."""
    return empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device, group=group)


def is_shared(tensor: Tensor, *, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the tensor is in this process's current heap, or in the group's GPU memory.

    Args:
        tensor: any tensor.
        group: used for a tensor that is not on the CPU; None is the default group.

    Raises:
        TypeError: it is no tensor.
    """
    from dreamcomm._torch.build_check import check_build

    check_build()
    from dreamcomm import _C

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"dreamcomm.is_shared: expected a tensor, got {type(tensor).__name__}")
    if tensor.device.type == "cpu":
        return _C.is_in_heap(tensor)
    from dreamcomm._torch.groups import backend_of

    try:
        backend = backend_of(group)
    except ValueError:  # no group of dreamcomm, no memory of one
        return False
    return backend._holds(tensor)


def share_(module: M) -> M:
    """Moves a module's CPU parameters, buffers and gradients into the shared heap, in place.

    The parameters stay the same objects, so optimizers and hooks stay valid. A missing gradient is
    created as zeros, so that it is in the heap from the first step on; keep it there with
    ``zero_grad(set_to_none=False)``. Tensors that share memory (tied weights) share it afterwards,
    too, also those that were tied by ``.data``.

    Returns:
        The module.

    Raises:
        ValueError: one of them is no ordinary tensor (it is sparse, quantized, lazy or a DTensor),
            or two overlap in a part of their memory. Nothing has been moved then.
        TypeError: it is no module.
    """
    from dreamcomm._torch.overlap import same_memory

    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            "dreamcomm.share_: expected a module (torch.nn.Module), got "
            f"{type(module).__name__}; dreamcomm.empty_like makes single tensors in shared memory"
        )
    kind = type(module).__name__
    held: list[tuple[str, Tensor]] = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _check_movable(f"{kind}.{name}", tensor)
        held.append((f"{kind}.{name}", tensor))
        if tensor.is_leaf and tensor.grad is not None:
            _check_movable(f"the gradient of {kind}.{name}", tensor.grad)
            held.append((f"the gradient of {kind}.{name}", tensor.grad))
    ties = same_memory(held, "dreamcomm.share_")
    with torch.no_grad():
        for numbers in ties:
            whole = held[numbers[0]][1].data
            if whole.device.type == "cpu":
                moved = _moved(whole)
                for number in numbers:
                    held[number][1].data = moved
        for parameter in module.parameters():
            if (
                parameter.device.type == "cpu"
                and parameter.requires_grad
                and parameter.grad is None
            ):
                parameter.grad = zeros(*parameter.shape, dtype=parameter.dtype)
    return module


def _on_cpu(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    from dreamcomm import _C
    from dreamcomm.backend import heap_bytes

    size_of_heap = heap_bytes()
    if size_of_heap == 0:  # as where the heap is full
        return torch.empty(shape, dtype=dtype, device="cpu")
    return _C.allocate(shape.numel(), dtype, size_of_heap).view(shape)


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


def _check_movable(name: str, tensor: Tensor) -> None:
    from torch.nn.parameter import is_lazy
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    kind = (
        type(tensor).__name__
        if is_lazy(tensor) or is_traceable_wrapper_subclass(tensor)
        else "quantized tensor"
        if tensor.is_quantized
        else f"tensor of layout {tensor.layout}"
        if tensor.layout is not torch.strided
        else "nested tensor"
        if tensor.is_nested
        else None
    )
    if kind is not None:
        raise ValueError(
            f"dreamcomm.share_: {name} is a {kind}; only ordinary dense tensors can be moved into "
            "shared memory. Nothing was moved"
        )


def _moved(tensor: Tensor) -> Tensor:
    return tensor if is_shared(tensor) else empty_like(tensor).copy_(tensor)
