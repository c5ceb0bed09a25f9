"""Values as messages: a description of their structure, and the tensors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dreamcomm.backend import heap_bytes
from dreamcomm.messages.dumping import SIMPLE, dumped

__all__ = ["Codec", "Described", "TensorMeta", "described"]

MOST_KNOWN = 256  # descriptions that are kept


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


class Described(NamedTuple):
    """A value without its tensors.

    Attributes:
        spec: the tree that the leaves make; None: the value is its one leaf.
        leaves: a TensorMeta for each tensor, and all other leaves as they are.
        metas: those of tensors.
    """

    spec: pytree.TreeSpec | None
    leaves: tuple[Any, ...]
    metas: tuple[TensorMeta, ...]


class Codec:
    """Turns values into bytes and tensors, and back.

    A value is any tree of torch.utils._pytree. Its leaves are dense tensors, or anything that can
    be pickled. Descriptions that come again are decoded once.
    """

    def __init__(self) -> None:
        self._decoded: Callable[[bytes], Described] = lru_cache(MOST_KNOWN)(_decode)
        self._dumped: Callable[[TensorMeta], bytes] = lru_cache(MOST_KNOWN)(dumped)
        from dreamcomm import _C

        self._single: dict[tuple[Any, ...], bytes] = {}
        self._heap_bytes = heap_bytes()
        self._allocate = _C.allocate

    def encode(self, value: Any) -> tuple[bytes, list[Tensor], bool]:
        """The description's bytes, the tensors, and whether the bytes alone say what it is.

        Raises:
            TypeError: a leaf cannot be sent.
        """
        if isinstance(value, Tensor):
            return self._encoded_tensor(value)
        leaves, spec = pytree.tree_flatten(value)
        tensors, simple = [], True
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[number], memory = _tensor_meta(leaf)
                tensors.append(memory)
            else:
                simple = simple and isinstance(leaf, SIMPLE)
        return dumped(pytree.tree_unflatten(leaves, spec)), tensors, simple

    def _encoded_tensor(self, tensor: Tensor) -> tuple[bytes, list[Tensor], bool]:
        """A bare tensor, the most frequent value. Known ones are described by a look-up."""
        plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
        if not plain or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            meta, memory = _tensor_meta(tensor)
            return self._dumped(meta), [memory], True
        key = (tensor.shape, tensor.dtype, tensor.requires_grad)
        data = self._single.get(key)
        if data is None:
            data = self._dumped(_tensor_meta(tensor)[0])
            if len(self._single) < MOST_KNOWN:
                self._single[key] = data
        return data, [tensor.detach()], True

    def decode(self, data: bytes, simple: bool) -> Described:
        """The description; ``simple`` is the last thing that :meth:`encode` gave."""
        return self._decoded(data) if simple else _decode(data)

    def memory_for(self, meta: TensorMeta) -> tuple[Tensor, Tensor]:
        """A tensor of the described kind, and a contiguous one on its memory to receive into.

        On CPUs the memory is in the heap that peers map.
        """
        shape = meta.memory_shape
        if meta.device == "cpu" and self._heap_bytes:
            memory = self._allocate(math.prod(shape), meta.dtype, self._heap_bytes).view(shape)
        else:
            memory = torch.empty(shape, dtype=meta.dtype, device=meta.device)
        return meta.in_order(memory), memory


def _decode(data: bytes) -> Described:
    tree = pickle.loads(data)
    if isinstance(tree, TensorMeta):
        return Described(None, (tree,), (tree,))
    leaves, spec = pytree.tree_flatten(tree)
    metas = tuple(one for one in leaves if isinstance(one, TensorMeta))
    return Described(spec, tuple(leaves), metas)


def _tensor_meta(tensor: Tensor) -> tuple[TensorMeta, Tensor]:
    """The description, and a contiguous tensor of the same memory, or of a copy."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be sent; give a dense one")
    plain = tensor.detach()
    if type(plain) is not Tensor and type(plain) is not torch.nn.Parameter:
        raise TypeError(
            f"a {type(tensor).__name__} cannot be sent; give a plain tensor "
            "(of a DTensor: to_local())"
        )
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


def assembled(what: Described, tensors: list[Tensor]) -> Any:
    """The value, with these tensors in the places of their descriptions.

    A tensor requires a gradient where it did at the sender.
    """
    found = iter(tensors)
    leaves = [
        _flagged(next(found), one) if isinstance(one, TensorMeta) else one for one in what.leaves
    ]
    return leaves[0] if what.spec is None else pytree.tree_unflatten(leaves, what.spec)


def _flagged(tensor: Tensor, meta: TensorMeta) -> Tensor:
    return tensor.requires_grad_() if meta.needs_grad else tensor


def described(value: Any) -> str:
    """A value in words for errors: "float32 [4, 8]", "(float32 [4, 8], None)"."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, tuple | list):
        inside = ", ".join(described(one) for one in value)
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {described(v)}" for k, v in value.items()) + "}"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
