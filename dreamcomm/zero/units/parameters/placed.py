"""Parameters before and after they are put where ranks read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.ranks.pieces import is_dense
from dreamcomm.zero.units.parameters.casts import Casts
from dreamcomm.zero.units.parameters.record import own_rows

if TYPE_CHECKING:
    from dreamcomm._C import Region

__all__ = ["Placed", "Source", "contiguous_strides", "source_of"]


@dataclass(frozen=True)
class Source:
    """What is placed.

    Attributes:
        shape, strides: of the whole parameter; its rows lie together.
        rows: this rank's.
        casts: of the unit.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: Tensor
    casts: Casts

    @property
    def dtype(self) -> torch.dtype:
        """The type of the whole parameter that passes use."""
        return self.casts.whole_dtype(self.rows.dtype)

    @property
    def is_cast(self) -> bool:
        return self.dtype != self.rows.dtype


@dataclass(frozen=True)
class Placed:
    """A parameter's tensors.

    Attributes:
        whole: all rows.
        rows: this rank's, which it alone writes.
        sent: what other ranks get of them: other memory, where they are cast.
        region: where whole ones lie; None: a scalar, or they are gathered.
    """

    whole: Tensor
    rows: Tensor
    sent: Tensor
    region: Region | None = None


def source_of(whole: Tensor, casts: Casts, group: dist.ProcessGroup) -> Source:
    """A whole tensor that lies elsewhere. Rows that do not lie together become contiguous."""
    rows = own_rows(whole.detach(), dist.get_world_size(group), dist.get_rank(group))
    return Source(tuple(whole.shape), _strides(whole), rows, casts)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's, if its rows lie together in memory; else those of a contiguous one."""
    rows = tensor.shape[0] if tensor.dim() > 0 else 1
    together = is_dense(tensor) and (rows <= 1 or tensor.stride(0) == tensor.numel() // rows)
    if together and tensor.numel() > 0:
        return tuple(tensor.stride())
    return contiguous_strides(tuple(tensor.shape))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a new tensor of that shape."""
    return tuple(torch.empty(tuple(shape), device="meta").stride())
