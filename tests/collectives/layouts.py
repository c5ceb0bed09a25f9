"""The same elements in memory of different shapes."""

from __future__ import annotations

import torch

import dreamcomm


def lay_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy of the 1-D tensor whose logical elements are `values`, laid out otherwise."""
    count = values.numel()
    if layout == "offset":  # contiguous, not at the start of its memory
        return torch.cat([values.new_zeros(3), values])[3:]
    if layout == "strided":
        room = values.new_zeros(2 * count + 1)
        room[1::2] = values
        return room[1::2]
    if layout == "transposed":
        return columns(values).t().contiguous().t()
    if layout == "heap":  # where peers can reach it
        return dreamcomm.empty_like(values).copy_(values)
    return values.clone()


def columns(values: torch.Tensor) -> torch.Tensor:
    """The 1-D tensor as two columns, or as one if its length is odd."""
    return values.reshape(-1, 2 if values.numel() % 2 == 0 and values.numel() else 1)
