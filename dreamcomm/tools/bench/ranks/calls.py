"""The calls of torch.distributed that are timed, bound to their tensors beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dreamcomm.tools.bench.operations import ROOT

if TYPE_CHECKING:
    from dreamcomm.tools.bench.ranks.buffers import Buffers

Bound = Callable[[], object]


def bind(op: str, group: dist.ProcessGroup, buffers: Buffers) -> list[Bound]:
    """One call for each row of the buffers."""
    rows = list(zip(buffers.input, buffers.output, strict=True))
    if op == "all_reduce":
        return [partial(dist.all_reduce, row, group=group) for row, _ in rows]
    if op == "broadcast":
        return [partial(dist.broadcast, row, group_src=ROOT, group=group) for row, _ in rows]
    if op == "reduce":
        return [partial(dist.reduce, row, group_dst=ROOT, group=group) for row, _ in rows]
    function = out_of_place(op)
    return [partial(function, target, row, group=group) for row, target in rows]


def bind_barrier(group: dist.ProcessGroup, calls: int) -> list[Bound]:
    """The same barrier, ``calls`` times."""
    return [partial(dist.barrier, group=group)] * calls


def out_of_place(op: str) -> Callable[..., Any]:
    """The function of (output, input); torch 2.13 renamed two of them."""
    names = {
        "all_gather": ("all_gather_single", "all_gather_into_tensor"),
        "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
        "all_to_all": ("all_to_all_single",),
    }
    found: Callable[..., Any] = next(
        getattr(dist, name) for name in names[op] if hasattr(dist, name)
    )
    return found
