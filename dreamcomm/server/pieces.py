"""Moves elements between tensors of any layout and device, and the pieces of messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dreamcomm.server.layout import Part, Piece

__all__ = ["Scatter", "gathered"]


def gathered(piece: Piece, tensors: Sequence[Tensor | None]) -> Tensor:
    """A piece's elements, contiguous on the CPU: a view where they lie together there.

    Args:
        piece: which elements.
        tensors: by parameter; None counts as zeros.
    """
    found = [_elements(tensors[part.parameter], part, piece.dtype) for part in piece.parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def _elements(tensor: Tensor | None, part: Part, dtype: torch.dtype) -> Tensor:
    if tensor is None:
        return torch.zeros(part.end - part.begin, dtype=dtype, device="cpu")
    return tensor.detach().reshape(-1)[part.begin : part.end].to("cpu", dtype)


class Scatter:
    """Writes pieces into tensors, piece after piece in order.

    Args:
        tensors: by parameter. One that is not contiguous is written when all its elements are here.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._staged: dict[int, Tensor] = {}

    def put(self, piece: Piece, data: Tensor) -> None:
        """Writes a piece's elements."""
        place = 0
        for part in piece.parts:
            count = part.end - part.begin
            self._write(part, data[place : place + count])
            place += count

    def _write(self, part: Part, elements: Tensor) -> None:
        tensor = self._tensors[part.parameter]
        if tensor.is_contiguous():
            tensor.view(-1)[part.begin : part.end].copy_(elements)
            return
        staged = self._staged.get(part.parameter)
        if staged is None:
            staged = torch.empty(tensor.numel(), dtype=elements.dtype, device="cpu")
            self._staged[part.parameter] = staged
        staged[part.begin : part.end].copy_(elements)
        if part.end == tensor.numel():
            tensor.copy_(self._staged.pop(part.parameter).view(tensor.shape))
