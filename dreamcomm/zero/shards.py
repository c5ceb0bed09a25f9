"""A rank's part of each parameter: what the inner optimizer steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dreamcomm import memory
from dreamcomm.buckets.layout import is_replicated, shard_layout
from dreamcomm.ranks.pieces import as_placed, is_dense

__all__ = [
    "ParameterShard",
    "ShardedGroups",
    "make_shards",
    "masters_of",
    "refresh_masters",
    "settle_parameters",
]


@dataclass(eq=False)
class ParameterShard:
    """This rank's rows of a parameter.

    Attributes:
        name: of the parameter, for messages.
        parameter: the whole one; its rows lie in memory one after the other.
        tensor: this rank's rows: a view of the parameter's memory, or a copy of more bits.
        begin: the first row; 0 of a scalar.
        offset, numel: this rank's elements in the parameter, in the order of memory.
        replicated: a scalar, which all ranks step.
        has_master: ``tensor`` is a copy.
        address, shape, strides: of the parameter's memory when ``tensor`` was made.
    """

    name: str
    parameter: torch.nn.Parameter
    tensor: Tensor
    begin: int
    offset: int
    numel: int
    replicated: bool
    has_master: bool
    address: int
    shape: torch.Size
    strides: tuple[int, ...]

    @property
    def sum_dtype(self) -> torch.dtype:
        """What this rank's elements of the gradient are computed and kept in."""
        return self.tensor.dtype

    def has_moved(self) -> bool:
        """Whether the parameter has got other memory, another order of it, or another size."""
        now = self.parameter
        if now.data_ptr() != self.address:
            return True
        return now.stride() != self.strides or now.shape != self.shape

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor of the parameter's shape."""
        if self.replicated:
            return whole
        return whole.narrow(0, self.begin, self.tensor.shape[0])

    def shaped(self, elements: Tensor) -> Tensor:
        """Flat elements of this rank, in the order of memory, as rows."""
        return as_placed(elements, self.tensor)

    def new_state(self) -> Tensor:
        """A part of the state, as rows lie: zeros."""
        return torch.zeros_like(self.tensor)

    def state_of(self, value: Tensor) -> Tensor:
        """A part of the state, as rows lie: a copy of this rank's elements of it."""
        return torch.empty_like(self.tensor).copy_(value)

    def holds_state(self, value: Tensor) -> bool:
        """Whether a part of the state lies in the memory that it is kept in."""
        return True

    def write_back(self) -> None:
        """Rounds the copy of more bits into the parameter."""
        if self.has_master:
            self.rows(self.parameter.detach()).copy_(self.tensor)


@dataclass(frozen=True)
class ShardedGroups:
    """An optimizer's groups, and this rank's rows of their parameters.

    Attributes:
        groups: with whole parameters.
        shards: by the ids of the parameters.
        inner: steps the rows, and keeps the state.
        process_group: its ranks have the other rows.
    """

    groups: Sequence[dict[str, Any]]
    shards: Mapping[int, ParameterShard]
    inner: Optimizer
    process_group: dist.ProcessGroup

    @property
    def device(self) -> torch.device:
        """The device of all parameters."""
        return next(iter(self.shards.values())).parameter.device


def settle_parameters(
    named: Sequence[tuple[str, Tensor]], ties: Sequence[Sequence[int]], *, shared: bool
) -> bool:
    """Has the rows of each parameter lie in memory one after the other, shared if it can be.

    Most do, also in the order of channels last; others become contiguous. A warning names those
    that have moved away from other tensors on their memory, such as a buffer that is a view.

    Args:
        named: parameters with their names.
        ties: the numbers of all parameters, those with one memory together: they keep one.

    Returns:
        Whether all lie in memory that ranks share.
    """
    from dreamcomm import _C

    parameters = [parameter for _, parameter in named]
    left: list[str] = []
    for numbers in ties:
        first = parameters[numbers[0]]
        whole = before = first.detach()
        if not _rows_lie_together(whole):
            whole = whole.contiguous()
        if shared and not memory.is_shared(whole) and whole.numel() > 0:
            place = memory.empty(whole.numel(), dtype=whole.dtype)
            whole = as_placed(place, whole).copy_(whole)
        if whole.data_ptr() != first.data_ptr():
            for number in numbers:
                parameters[number].data = whole
            if not _C.owns_memory(before):
                left.append(named[numbers[0]][0])
    if left:
        _warn_of_left(left)
    if shared:
        _C.give_back_free_pages()  # malloc might keep as many bytes as the model has
    return shared and all(memory.is_shared(one) or one.numel() == 0 for one in parameters)


def _warn_of_left(names: Sequence[str]) -> None:
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    warnings.warn(
        f"ZeroOptimizer: {len(names)} parameters ({some}) had memory that other tensors have, too, "
        "such as a buffer that is a view of one, and have moved into memory that the ranks share. "
        "The others keep the values of now: make them from the parameters, after the optimizer",
        stacklevel=5,
    )


def _rows_lie_together(whole: Tensor) -> bool:
    if not is_dense(whole):
        return False
    rows = whole.shape[0] if whole.dim() > 0 else 1
    return rows <= 1 or whole.stride(0) == whole.numel() // rows


def make_shards(
    named: Sequence[tuple[str, torch.nn.Parameter]],
    world: int,
    rank: int,
    master_dtype: torch.dtype | None,
) -> list[ParameterShard]:
    """This rank's part of each parameter."""
    pieces = shard_layout([tuple(one.shape) for _, one in named], world, rank)
    shards = []
    for (name, parameter), piece in zip(named, pieces, strict=True):
        replicated = is_replicated(tuple(parameter.shape))
        whole = parameter.detach()
        rows = whole if replicated else whole[piece.begin : piece.end]
        has_master = master_dtype not in (None, parameter.dtype) and parameter.is_floating_point()
        tensor = rows.to(master_dtype) if has_master else rows
        shards.append(
            ParameterShard(
                name,
                parameter,
                tensor,
                piece.begin,
                piece.offset,
                piece.numel,
                replicated,
                has_master,
                parameter.data_ptr(),
                parameter.shape,
                parameter.stride(),
            )
        )
    return shards


def refresh_masters(shards: Iterable[ParameterShard]) -> None:
    """Reads a copy anew where it does not round to the parameter, which somebody has written to.

    All elements are compared, as a write through ``.data`` counts no version. An element that
    rounds to the parameter's keeps its bits. So weights and optimizer may be loaded in any order.
    """
    with torch.no_grad():
        for one in shards:
            if not one.has_master:
                continue
            rows = one.rows(one.parameter.detach())
            kept = one.tensor.to(rows.dtype) == rows
            if not bool(kept.all()):
                one.tensor.copy_(torch.where(kept, one.tensor, rows.to(one.tensor.dtype)))


def masters_of(shards: Sequence[ParameterShard]) -> list[Tensor | None]:
    """The copies of more bits, where there are such."""
    return [one.tensor if one.has_master else None for one in shards]
