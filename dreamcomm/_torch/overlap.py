"""Tensors that share memory: which are the same elements, and which overlap in part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["same_memory"]


class _Extent(NamedTuple):
    """The addresses between a tensor's first and last element."""

    begin: int
    end: int
    number: int


def same_memory(named: Iterable[tuple[str, Tensor]], what: str) -> list[list[int]]:
    """Groups tensors that have the same elements, such as weights that are tied by ``.data``.

    Args:
        named: tensors with the names that errors use. One tensor may be given several times.
            Tensors without memory of their own (on the meta device, sparse, wrapped, empty) stand
            alone.
        what: is made of the tensors, for errors.

    Returns:
        The numbers of the given tensors, each once, by the memory that they have. Groups are in the
        order of their first members.

    Raises:
        ValueError: tensors overlap in part, or in another shape, order or dtype: no change of one
            could be followed in the other. It names both.
    """
    pairs = list(named)
    groups: dict[object, list[int]] = {}
    extents: list[_Extent] = []
    for number, (_, tensor) in enumerate(pairs):
        if not _has_memory(tensor):
            groups.setdefault(id(tensor), []).append(number)
            continue
        key = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, _strides(tensor)
        if key not in groups:
            begin = tensor.data_ptr()
            extents.append(_Extent(begin, begin + _span(tensor) * tensor.element_size(), number))
        groups.setdefault(key, []).append(number)
    _check_apart(extents, pairs, what)
    return list(groups.values())


def _check_apart(extents: list[_Extent], pairs: Sequence[tuple[str, Tensor]], what: str) -> None:
    """Raises where elements of two tensors lie at the same addresses."""
    extents.sort()
    open_: list[_Extent] = []  # those that reach beyond where the next one begins
    for extent in extents:
        open_ = [one for one in open_ if one.end > extent.begin]
        for other in open_:
            first, second = sorted((extent.number, other.number))
            if _share_elements(pairs[first][1], pairs[second][1]):
                raise ValueError(
                    f"{what}: {pairs[first][0]!r} and {pairs[second][0]!r} overlap in memory, but "
                    "are not the same elements in the same order: make one of them a copy "
                    "(.clone()), or use one parameter in both places"
                )
        open_.append(extent)


def _has_memory(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False  # a subclass may have no address
    is_plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    return is_plain and tensor.numel() > 0


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of those dimensions that have several elements: others say nothing."""
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def _span(tensor: Tensor) -> int:
    """Elements from the first address to behind the last one."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _share_elements(one: Tensor, other: Tensor) -> bool:
    """Whether an address belongs to both, by marking one's bytes. Rows and columns of one matrix
    may lie between each other without that."""
    if one.device != other.device:
        return False
    low = min(one.data_ptr(), other.data_ptr())
    marks = torch.zeros(
        max(t.data_ptr() + _span(t) * t.element_size() for t in (one, other)) - low,
        dtype=torch.bool,
        device="cpu",
    )
    _bytes_of(one, marks, low).fill_(True)
    return bool(_bytes_of(other, marks, low).any())


def _bytes_of(tensor: Tensor, marks: Tensor, low: int) -> Tensor:
    """The marks of a tensor's bytes: its shape, with a dimension for the bytes of an element."""
    item = tensor.element_size()
    return marks.as_strided(
        (*tensor.shape, item),
        (*(stride * item for stride in tensor.stride()), 1),
        tensor.data_ptr() - low,
    )
