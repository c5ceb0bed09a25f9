"""Values as messages: a description of their structure, and the tensors."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dreamcomm.backend import heap_bytes
from dreamcomm.messages.dumping import SIMPLE, dumped
from dreamcomm.messages.tensor_meta import TensorMeta, described_tensor

__all__ = ["Codec", "Described", "assembled", "described"]

MOST_KNOWN = 256  # descriptions that are kept


class Described(NamedTuple):
    """A value without its tensors.

    Attributes:
        metas: of the tensors, in the order of the leaves.
        packed: the structure and the leaves, pickled. They are the sender's own classes, made only
            for who asks for the value.
        spec: the tree that the leaves make; None: the value is its one leaf, or is packed.
        leaves: a TensorMeta for each tensor, and all other leaves as they are.
    """

    metas: tuple[TensorMeta, ...]
    packed: bytes | None = None
    spec: pytree.TreeSpec | None = None
    leaves: tuple[Any, ...] = ()


class Codec:
    """Turns values into bytes and tensors, and back.

    A value is any tree of torch.utils._pytree. Its leaves are dense tensors, or anything that can
    be pickled. Trees of tuples, lists, dicts and plain values are decoded once, where they come
    again.

    INVARIANT: decoding a description runs none of the user's code, so that each message's tensors
    are known and received in order. Classes of the user's, which may refuse to be unpickled, are
    packed apart, and made when the value is asked for. Registered classes are made of the tensors
    that have arrived, and never of descriptions: they may look at what they hold.
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
        metas, tensors = [], []
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                try:
                    leaves[number], memory = described_tensor(leaf)
                except TypeError as error:
                    raise TypeError(f"value{_place(value, number)}: {error}") from error
                metas.append(leaves[number])
                tensors.append(memory)
        if _is_plain(value):
            return dumped(pytree.tree_unflatten(leaves, spec)), tensors, True
        return dumped((tuple(metas), dumped((spec, tuple(leaves))))), tensors, False

    def _encoded_tensor(self, tensor: Tensor) -> tuple[bytes, list[Tensor], bool]:
        """A bare tensor, the most frequent value. Known ones are described by a look-up."""
        plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
        if (
            not plain
            or tensor.is_nested
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            meta, memory = described_tensor(tensor)
            return self._dumped(meta), [memory], True
        key = (tensor.shape, tensor.dtype, tensor.requires_grad)
        data = self._single.get(key)
        if data is None:
            data = self._dumped(described_tensor(tensor)[0])
            if len(self._single) < MOST_KNOWN:
                self._single[key] = data
        return data, [tensor.detach()], True

    def decode(self, data: bytes, simple: bool) -> Described:
        """The description; ``simple`` is the last thing that :meth:`encode` gave."""
        return self._decoded(data) if simple else Described(*pickle.loads(data))

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


def _is_plain(value: Any) -> bool:
    """Whether a value is made of tensors, plain values, and tuples, lists and dicts of them."""
    kind = type(value)
    if kind is tuple or kind is list:
        return all(map(_is_plain, value))
    if kind is dict:
        return all(type(key) in SIMPLE for key in value) and all(map(_is_plain, value.values()))
    return kind in SIMPLE or isinstance(value, Tensor)


def _place(value: Any, number: int) -> str:
    """Where a leaf is in a tree: "[1]['mask']"."""
    return pytree.keystr(pytree.tree_flatten_with_path(value)[0][number][0])


def _decode(data: bytes) -> Described:
    tree = pickle.loads(data)
    if isinstance(tree, TensorMeta):
        return Described((tree,), leaves=(tree,))
    leaves, spec = pytree.tree_flatten(tree)
    metas = tuple(one for one in leaves if isinstance(one, TensorMeta))
    return Described(metas, None, spec, tuple(leaves))


def assembled(what: Described, tensors: list[Tensor]) -> Any:
    """The value, with these tensors in the places of their descriptions.

    A tensor requires a gradient where it did at the sender.

    Raises:
        TypeError: a class of the sender cannot be unpickled here.
    """
    spec, leaves = (what.spec, what.leaves) if what.packed is None else _unpacked(what.packed)
    found = iter(tensors)
    whole = [_flagged(next(found), one) if isinstance(one, TensorMeta) else one for one in leaves]
    return whole[0] if spec is None else pytree.tree_unflatten(whole, spec)


def _unpacked(packed: bytes) -> tuple[pytree.TreeSpec, tuple[Any, ...]]:
    try:
        spec, leaves = pickle.loads(packed)
    except Exception as error:
        raise TypeError(
            f"a value that was sent cannot be unpickled: {type(error).__name__}: {error}; its "
            "class has to be the same on all ranks, and importable"
        ) from error
    return spec, leaves


def _flagged(tensor: Tensor, meta: TensorMeta) -> Tensor:
    return tensor.requires_grad_() if meta.needs_grad else tensor


def described(value: Any) -> str:
    """A value in words for errors: "float32 [4, 8]", "(float32 [4, 8], None)"."""
    if isinstance(value, Tensor):
        shape = "(nested)" if value.is_nested else list(value.shape)
        return f"{str(value.dtype).removeprefix('torch.')} {shape}"
    if isinstance(value, tuple | list):
        inside = ", ".join(described(one) for one in value)
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{described(k)}: {described(v)}" for k, v in value.items()) + "}"
    text = repr(value) if type(value) in SIMPLE else ""
    return text if 0 < len(text) <= 40 else f"a {type(value).__name__}"
