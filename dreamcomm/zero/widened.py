"""Steps of 16-bit rows in float32, so that an element's step does not depend on its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["widened"]


@contextmanager
def widened(optimizer: Optimizer, rows: Sequence[Tensor]) -> Iterator[None]:
    """Has an optimizer step rows, and what it keeps of them, in float32.

    Args:
        optimizer: has the rows among its parameters.
        rows: of 16 bits. At the end they are the float32 rows, rounded, in the memory of before.
    """
    narrow = [one.data for one in rows]
    for one, before in zip(rows, narrow, strict=True):
        one.data = before.float()
        _cast_state(optimizer, one, before.dtype, torch.float32)
    try:
        yield
    finally:
        for one, before in zip(rows, narrow, strict=True):
            before.copy_(one.data)
            one.data = before
            _cast_state(optimizer, one, torch.float32, before.dtype)


def _cast_state(optimizer: Optimizer, row: Tensor, given: torch.dtype, wanted: torch.dtype) -> None:
    """Casts what is kept of each element; numbers of the whole parameter stay."""
    state = optimizer.state.get(row)
    for key, value in {} if state is None else dict(state).items():
        is_kept = isinstance(value, Tensor) and value.shape == row.shape and value.dim() > 0
        if is_kept and value.dtype == given:
            optimizer.state[row][key] = value.to(wanted)
