"""Moves elements between tensors of any layout and device, and the pieces of messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dreamcomm.ranks.pieces import Part
from dreamcomm.server.layout import ServerPiece

__all__ = ["Gather", "Scatter"]


class Gather:
    """Reads pieces from tensors, piece after piece in order.

    Args:
        tensors: by parameter; None counts as zeros.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = tensors
        self._latest, self._flat = -1, torch.empty(0, device="cpu")

    def get(self, piece: ServerPiece) -> Tensor:
        """A piece's elements, contiguous on the CPU: a view where they lie together there."""
        found = [self._elements(part, piece.dtype) for part in piece.parts]
        if len(found) == 1:
            return found[0].to("cpu")
        if len({one.device for one in found}) > 1:
            found = [one.to("cpu") for one in found]
        if not found:
            return torch.empty(0, dtype=piece.dtype, device="cpu")
        return torch.cat(found).to("cpu")

    def _elements(self, part: Part, dtype: torch.dtype) -> Tensor:
        tensor = self._tensors[part.tensor]
        if tensor is None:
            return torch.zeros(part.numel, dtype=dtype, device="cpu")
        if self._latest != part.tensor:
            # One that is not contiguous is copied, once for all of its pieces.
            self._latest, self._flat = part.tensor, tensor.detach().reshape(-1)
        return self._flat[part.begin : part.end].to(dtype)


class Scatter:
    """Writes pieces into tensors, piece after piece in order.

    Args:
        tensors: by parameter. One that is not contiguous is written when all its elements are here.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._staged: dict[int, Tensor] = {}

    def put(self, piece: ServerPiece, data: Tensor) -> None:
        """Writes a piece's elements."""
        sizes = [part.numel for part in piece.parts]
        for part, elements in zip(piece.parts, torch.split(data, sizes), strict=True):
            self._write(part, elements)

    def _write(self, part: Part, elements: Tensor) -> None:
        tensor = self._tensors[part.tensor]
        if tensor.is_contiguous():
            tensor.view(-1)[part.begin : part.end].copy_(elements)
            return
        staged = self._staged.get(part.tensor)
        if staged is None:
            staged = torch.empty(tensor.numel(), dtype=elements.dtype, device="cpu")
            self._staged[part.tensor] = staged
        staged[part.begin : part.end].copy_(elements)
        if part.end == tensor.numel():
            tensor.copy_(self._staged.pop(part.tensor).view(tensor.shape))
