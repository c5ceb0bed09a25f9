"""Cuts lists of tensors into runs and pieces of bounded size. Pure functions of sizes and layouts.

A run has whole tensors. A piece may cover parts of several tensors, and a large tensor may have
several pieces, so a copy of one piece is all the memory that sending needs::

    tensors   |    0    |  1 |  2 |        3        |
    runs      [        ][        ][                 ]
    pieces    [      ][      ][      ][      ][     ]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Part", "as_placed", "by_kind", "cut", "in_memory_order", "is_dense", "runs", "views"]


@dataclass(frozen=True)
class Part:
    """Elements of a tensor, by its number in the list."""

    tensor: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


# Lists of tensors.


def by_kind(numbers: Iterable[int], tensors: Sequence[Tensor]) -> list[list[int]]:
    """Groups numbers of tensors by dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number in numbers:
        one = tensors[number]
        kinds.setdefault((one.dtype, one.device), []).append(number)
    return list(kinds.values())


def runs(tensors: Sequence[Tensor], most: int) -> Iterator[list[int]]:
    """Groups tensors of one dtype and device into runs of at most ``most`` bytes.

    A larger tensor is a run of its own. Yields the tensors' numbers.
    """
    for members in by_kind(range(len(tensors)), tensors):
        run: list[int] = []
        nbytes = 0
        for number in members:
            if run and nbytes + tensors[number].nbytes > most:
                yield run
                run, nbytes = [], 0
            run.append(number)
            nbytes += tensors[number].nbytes
        yield run


def cut(sizes: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[Part, ...]]:
    """Cuts tensors, one after the other, into pieces of ``most`` elements; the last has the rest.

    Args:
        sizes: the number of each tensor, with its number of elements. Empty ones are in no piece.
        most: at least 1.
    """
    parts: list[Part] = []
    room = most
    for number, numel in sizes:
        begin = 0
        while begin < numel:
            end = min(begin + room, numel)
            parts.append(Part(number, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield tuple(parts)
                parts, room = [], most
    if parts:
        yield tuple(parts)


def views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """A flat tensor's elements in these shapes, one after the other."""
    parts = torch.split(flat, [torch.Size(shape).numel() for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


# Elements of a tensor.


def is_dense(tensor: Tensor) -> bool:
    """Whether elements lie in memory without gaps, each once, in any order of dimensions."""
    found: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return found


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory, as a flat view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def as_placed(flat: Tensor, like: Tensor) -> Tensor:
    """Flat elements in the order of a dense tensor's memory, as a view of that tensor's shape."""
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
