"""Descriptions of the tensors in a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TensorMeta", "described_tensor"]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor's description in a message.

    Attributes:
        shape: as the sender has it.
        dtype: as the sender has it.
        device: its type, such as "cpu".
        order: dimensions from the slowest to the fastest in memory; None: as in the shape.
        needs_grad: the tensor requires a gradient at the sender.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    order: tuple[int, ...] | None
    needs_grad: bool

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The shape of the contiguous tensor that travels."""
        if self.order is None:
            return self.shape
        return tuple(self.shape[d] for d in self.order)

    def in_order(self, memory: Tensor) -> Tensor:
        """The described tensor on the memory of the one that travels."""
        if self.order is None:
            return memory
        return memory.permute([self.order.index(d) for d in range(len(self.order))])

    def __reduce__(self) -> tuple[type[TensorMeta], tuple[Any, ...]]:
        return TensorMeta, (self.shape, self.dtype, self.device, self.order, self.needs_grad)


def described_tensor(tensor: Tensor) -> tuple[TensorMeta, Tensor]:
    """The description, and a contiguous tensor of the same memory, or of a copy.

    Raises:
        TypeError: a tensor of this kind cannot be sent.
    """
    plain = tensor.detach()
    kind = _refused(plain)
    if kind is not None:
        raise TypeError(f"{kind} cannot be sent; give a dense, plain tensor")
    order = None
    if not plain.is_contiguous():
        strides = plain.stride()
        ranked = tuple(sorted(range(plain.dim()), key=lambda d: (-strides[d], d)))
        permuted = plain.permute(ranked)
        if permuted.is_contiguous():
            plain, order = permuted, ranked
        else:
            plain = plain.contiguous()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    shape = tuple(tensor.shape)
    return TensorMeta(shape, tensor.dtype, tensor.device.type, order, tensor.requires_grad), plain


def _refused(tensor: Tensor) -> str | None:
    """The kind of a detached tensor that cannot be sent, in words; None: it can be."""
    if tensor.is_nested:
        return "a nested tensor (its values and lengths can)"
    if type(tensor) is not Tensor:
        return f"a {type(tensor).__name__} (of a DTensor: to_local())"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return f"a quantized tensor of {tensor.dtype}"
    return "a tensor on the meta device, without values," if tensor.is_meta else None
