"""Residuals of error feedback: the parts of gradients not sent yet, kept by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dreamcomm.ranks.pieces import as_placed, is_dense

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class Residuals:
    """Residuals in float32. Those of one bucket form a row, and move with their parameters.

    Rows are on the devices of their buckets. They are used in the order of backward passes, whose
    streams torch orders one after the other, so they need no further synchronization.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[list[Tensor], Tensor]] = {}  # by bucket, with its parameters
        self._parts: dict[Tensor, Tensor] = {}  # by parameter, in the order first seen
        self._loaded: list[Tensor] = []  # for parameters not seen yet, in that order

    def row(self, bucket: GradBucket) -> Tensor:
        """The residuals of a bucket, flat, in the bucket's order.

        Raises:
            ValueError: loaded residuals do not fit its parameters.
        """
        parameters, device = bucket.parameters(), bucket.buffer().device
        known, row = self._rows.get(bucket.index(), ([], torch.empty(0, device="cpu")))
        if not _same(known, parameters) or row.device != device:
            row = self._make_row(parameters, device)
            self._rows[bucket.index()] = parameters, row
        if bucket.is_last():
            for index in [i for i in self._rows if i > bucket.index()]:
                del self._rows[index]
            if len(self._loaded) > len(self._parts):
                raise _misfit(f"{len(self._loaded)} residuals", f"{len(self._parts)} parameters")
            self._loaded = []  # all have been assigned
        return row

    def of(self, parameter: Tensor) -> Tensor | None:
        """A copy of a parameter's residual, or None if the parameter was not seen."""
        part = self._parts.get(parameter)
        return None if part is None else _shaped(part.clone(), parameter)

    def copies(self) -> list[Tensor]:
        """Copies of all residuals, in the order in which their parameters were first seen."""
        seen = [_shaped(part.clone(), parameter) for parameter, part in self._parts.items()]
        return seen + [tensor.clone() for tensor in self._loaded[len(seen) :]]

    def load(self, residuals: Sequence[Tensor]) -> None:
        """Loads the result of copies(), now or when the parameters are first seen.

        Raises:
            ValueError: they do not fit the parameters seen so far.
        """
        for tensor in residuals:
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
                what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise _misfit(f"an item of type {what}", "residuals, tensors of float32")
        if self._parts and len(residuals) != len(self._parts):
            raise _misfit(f"{len(residuals)} residuals", f"{len(self._parts)} parameters")
        for parameter, tensor in zip(self._parts, residuals, strict=False):
            _require_fit(tensor, parameter)
        for (parameter, part), tensor in zip(self._parts.items(), residuals, strict=False):
            _shaped(part, parameter).copy_(tensor)
        self._loaded = [] if self._parts else [tensor.detach().clone() for tensor in residuals]

    def _make_row(self, parameters: list[Tensor], device: torch.device) -> Tensor:
        sizes = [parameter.numel() for parameter in parameters]
        row = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        for parameter, part in zip(parameters, torch.split(row, sizes), strict=True):
            if parameter in self._parts:
                part.copy_(self._parts[parameter])
            elif self._loaded:
                _shaped(part, parameter).copy_(self._next_loaded(parameter))
            self._parts[parameter] = part
        return row

    def _next_loaded(self, parameter: Tensor) -> Tensor:
        if len(self._parts) >= len(self._loaded):
            raise _misfit(f"{len(self._loaded)} residuals", "more parameters")
        tensor = self._loaded[len(self._parts)]
        _require_fit(tensor, parameter)
        return tensor


def _shaped(part: Tensor, parameter: Tensor) -> Tensor:
    """A view of a parameter's elements of a bucket in its shape.

    Buckets have a dense parameter in its order in memory, which channels_last changes.
    """
    if is_dense(parameter):
        return as_placed(part, parameter)
    return part.view(parameter.shape)  # it has gaps, and is contiguous in the bucket


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _require_fit(tensor: Tensor, parameter: Tensor) -> None:
    if tensor.shape != parameter.shape:
        raise _misfit(f"one of shape {tuple(tensor.shape)}", f"one of {tuple(parameter.shape)}")


def _misfit(got: str, there: str) -> ValueError:
    return ValueError(
        f"expected residuals of the model that they were saved with, got {got} where it has "
        f"{there}; load the checkpoint of this model, wrapped with the same settings"
    )
