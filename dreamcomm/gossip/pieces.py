"""A model's tensors as flat pieces of bounded size, which travel and are averaged one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dreamcomm.ranks.pieces import Part, by_kind, cut, in_memory_order, is_dense

__all__ = ["PIECE_BYTES", "GossipPiece", "Pieces", "increments"]

PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class GossipPiece:
    """What one message holds.

    Attributes:
        parts: of tensors of one dtype and device.
        is_buffer: of buffers, not of parameters.
    """

    parts: tuple[Part, ...]
    is_buffer: bool

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)


class Pieces:
    """Reads and changes tensors by pieces.

    A piece has elements of many small tensors, or a part of a large one. Elements go in the order
    in which they lie in memory, so shapes and strides have to be equal on all ranks. A tensor with
    gaps in memory is a piece of its own.

    Args:
        parameters: the first tensors.
        buffers: the others.
        piece_bytes: the most that a piece has.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._tensors = [*parameters, *buffers]
        self._strides = [one.stride() for one in self._tensors]
        count = self._count = len(parameters)
        made = [GossipPiece(parts, False) for parts in self._cut(range(count), piece_bytes)]
        others = self._cut(range(count, len(self._tensors)), piece_bytes)
        self.pieces = (*made, *(GossipPiece(parts, True) for parts in others))

    def follow(self, buffers: Sequence[Tensor]) -> None:
        """Goes on with these buffers, as a model may replace its own.

        Raises:
            RuntimeError: their number, shapes or dtypes are others.
        """
        kinds, known = [
            [(tuple(one.shape), one.dtype) for one in some]
            for some in (buffers, self._tensors[self._count :])
        ]
        if kinds != known:
            raise RuntimeError(
                f"Gossip: the model has buffers of {kinds}, and had {known} when Gossip was made; "
                'change them before that, or give buffers="local"'
            )
        self._tensors[self._count :] = buffers

    def __len__(self) -> int:
        return len(self.pieces)

    def _cut(self, numbers: Sequence[int], piece_bytes: int) -> Iterator[tuple[Part, ...]]:
        dense = []
        for number in numbers:
            if is_dense(self._tensors[number]):
                dense.append(number)
            else:
                yield (Part(number, 0, self._tensors[number].numel()),)
        for members in by_kind(dense, self._tensors):
            most = max(piece_bytes // self._tensors[members[0]].element_size(), 1)
            yield from cut(((number, self._tensors[number].numel()) for number in members), most)

    def read(self, number: int) -> Tensor:
        """A piece's elements, flat: a view where they are part of one tensor, else a copy."""
        found = [self._elements(part) for part in self.pieces[number].parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def copy(self, number: int) -> Tensor:
        """A piece's elements, flat, in memory of their own."""
        return torch.cat([self._elements(part) for part in self.pieces[number].parts])

    def add_(self, number: int, increments: Tensor) -> None:
        """Adds to a piece's elements. Tensors of 16 bits are rounded once."""
        parts = self.pieces[number].parts
        added = torch.split(increments, [part.numel for part in parts])
        for part, more in zip(parts, added, strict=True):
            tensor = self._tensors[part.tensor].detach()
            if is_dense(tensor):
                self._elements(part).add_(more)
            else:
                tensor.add_(more.view(tensor.shape))

    def _elements(self, part: Part) -> Tensor:
        """A view; a copy of a tensor with gaps."""
        tensor = self._tensors[part.tensor].detach()
        if tensor.stride() != self._strides[part.tensor]:
            raise RuntimeError(
                f"Gossip: tensor {part.tensor} of the model, of shape {list(tensor.shape)}, has "
                f"got the strides {tensor.stride()}, and had {self._strides[part.tensor]} when "
                "Gossip was made; change layouts before that"
            )
        if not is_dense(tensor):
            return tensor.reshape(-1)
        return in_memory_order(tensor)[part.begin : part.end]


def increments(own: Tensor, received: Sequence[tuple[float, Tensor]]) -> Tensor:
    """The sum of ``weight * (theirs - own)``, added in the given order.

    Differences keep equal values equal, whatever rounding the weights have, and those of two ranks
    cancel: one rank's is the negative of the other's, bit for bit. A product and its sum are
    rounded one after the other, so that no bit depends on where an element lies.

    Args:
        own: flat, as it was when it was sent.
        received: at least one weight with a tensor of the same shape and dtype, which is used up.

    Returns:
        A flat tensor, in float32 where the dtype has 16 bits.
    """
    dtype = torch.float32 if own.dtype in (torch.float16, torch.bfloat16) else own.dtype
    own, total = own.to(dtype), None
    for weight, theirs in received:
        part = theirs.to(dtype).sub_(own).mul_(weight)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total
