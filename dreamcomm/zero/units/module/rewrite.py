"""Writes whole parameters in place, by one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.ranks.agree import Failed, exchange
from dreamcomm.zero.units.follow import differs, take_in
from dreamcomm.zero.units.window import WindowError

if TYPE_CHECKING:
    from dreamcomm.zero.units.tree import Tree

__all__ = ["reset_parameters", "rewritten"]


@contextmanager
def rewritten(tree: Tree) -> Iterator[bool]:
    """See :meth:`FSDPModule.rewrite`.

    The window is closed meanwhile: no rank reads. One rank writes, after the others have ended
    their steps, and these wait at the end.
    """
    tree.close()
    if differs(tree.units()):
        take_in(tree)
    tree.window.before_rewrite()
    writes = dist.get_rank(tree.group) == 0
    _begin(tree, writes)
    failed: Exception | None = None
    try:
        with torch.no_grad():
            yield writes
    except Exception as error:
        failed = error
    finally:
        _end(tree, writes)

    def raised() -> None:
        if failed is not None:
            raise failed

    exchange(tree.group, raised, _failed)
    for one in tree.records():
        if one.is_replicated:
            dist.broadcast(one.whole.data, group_src=0, group=tree.group)


def _begin(tree: Tree, writes: bool) -> None:
    tree.rewrites = writes
    if writes:
        for unit in tree.units():
            unit.show_whole()
        for region in tree.regions():
            region.allow_writes(True)


def _end(tree: Tree, writes: bool) -> None:
    tree.rewrites = None
    tree.mark_changed()
    if writes:
        for region in tree.regions():
            region.allow_writes(False)
        for unit in tree.units():
            unit.show_sharded()


def _failed(failed: Failed) -> Exception:
    return WindowError(
        f"fully_shard: rewrite() failed on rank {failed.rank}, which writes: {failed.kind}: "
        f"{failed.text}. Parameters may be written in part"
    )


def reset_parameters(module: nn.Module) -> None:
    """Calls ``reset_parameters()`` of all modules that have it, in the order of the module."""
    for one in module.modules():
        reset: Callable[[], None] | None = getattr(one, "reset_parameters", None)
        if callable(reset):
            reset()
