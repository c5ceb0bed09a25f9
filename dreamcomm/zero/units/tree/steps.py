"""Closes a tree's window before any optimizer steps its parameters."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

if TYPE_CHECKING:
    from dreamcomm.zero.units.tree.tree import Tree

__all__ = ["watch_steps"]


def watch_steps(tree: Tree) -> weakref.finalize[[], Tree]:
    """Has all optimizers meet the tree before they step. It ends with the tree."""
    me = weakref.ref(tree)

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = me()
        if found is not None and _has_any(found, optimizer):
            _refuse_slices(found, optimizer)
            found.before_step()

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = me()
        if found is not None and _has_any(found, optimizer):
            found.mark_changed()

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return weakref.finalize(tree, end)


def _refuse_slices(tree: Tree, optimizer: Optimizer) -> None:
    """Raises ValueError where torch's kernels would round an element by its place in a row.

    They are the fused ones, and those of 16 bits. A ZeroOptimizer has other ones: ``steps_rows``.
    """
    if not tree.averages.shards or getattr(optimizer, "steps_rows", False):
        return
    name = type(optimizer).__name__
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused and isinstance(optimizer, (Adam, SGD, Adagrad)):
        raise ValueError(
            f"fully_shard: torch's fused {name} has other bits where a rank has other rows, so "
            f"invariant_shards= takes its foreach or single-tensor form, or ZeroOptimizer(..., "
            f"torch.optim.{name}): leave fused=True out"
        )
    narrow = [one.name for one in tree.records() if one.local.dtype.itemsize == 2]
    if narrow:
        raise ValueError(
            f"fully_shard: torch's {name} has other bits where a rank has other rows of 16 bits, "
            f"as of {narrow[0]!r}: with invariant_shards= use ZeroOptimizer(..., "
            f"torch.optim.{name}), or keep parameters in float32 and give mp_policy"
        )


def _has_any(tree: Tree, optimizer: Optimizer) -> bool:
    """Whether the optimizer has any of the tree's DTensors.

    Raises:
        RuntimeError: it has whole parameters, as it was made before they were sharded.
    """
    records = tree.records()
    sharded = {id(one.sharded) for one in records}
    wholes = {id(one.whole): one.name for one in records}
    found = False
    for group in optimizer.param_groups:
        for parameter in group.get("params", ()):
            key = id(parameter)
            if key in wholes:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step(): the optimizer was made before "
                    f"fully_shard, or within a forward pass: it has the whole parameter "
                    f"{wholes[key]!r}, whose rows other ranks own: make it of "
                    "module.parameters() after fully_shard"
                )
            found = found or key in sharded
    return found
