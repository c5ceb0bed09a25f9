"""Writes whole parameters in place, by one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dreamcomm.ranks.agree import Failed, exchange
from dreamcomm.zero.units.parameters.record import UnitParameter
from dreamcomm.zero.units.parameters.whole import own_shard, told, whole_of
from dreamcomm.zero.units.tree.follow import differs, take_in
from dreamcomm.zero.units.unit import unit_of
from dreamcomm.zero.units.window import WindowError

if TYPE_CHECKING:
    from dreamcomm.zero.units.tree.tree import Tree

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
    writes = not any(tree.mesh.get_coordinate() or ())  # the mesh's first rank
    work = InPlace(tree) if lies_in_place(tree) else InCopies(tree)
    tree.rewrites = writes
    work.begin(writes)
    failed: Exception | None = None
    try:
        with torch.no_grad():
            yield writes
    except Exception as error:
        failed = error
    finally:
        tree.rewrites = None
        work.put_back(writes)

    def raised() -> None:
        if failed is not None:
            raise failed
        work.check()

    exchange(tree.group, raised, work.failed)
    work.spread(writes)
    tree.mark_changed()


def lies_in_place(tree: Tree) -> bool:
    """Whether all rows lie where this rank can write them, in their own type."""
    is_one_copy = not (tree.form.gathers or tree.form.fills) and tree.replicas is None
    return is_one_copy and all(one.sent is one.local for one in tree.records())


class InPlace:
    """Whole parameters are the host's one copy."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def begin(self, writes: bool) -> None:
        if writes:
            for unit in self.tree.units():
                unit.show_whole()
            for region in self.tree.regions():
                region.allow_writes(True)

    def put_back(self, writes: bool) -> None:
        self.tree.mark_changed()
        if writes:
            self.tree.form.wrote([one.whole for one in self.tree.records()])
            for region in self.tree.regions():
                region.allow_writes(False)
            for unit in self.tree.units():
                unit.show_sharded()

    def check(self) -> None:
        """Nothing can be wrong: what was written is there."""

    def spread(self, writes: bool) -> None:
        for one in self.tree.records():
            if one.is_replicated:
                dist.broadcast(one.whole.data, group_src=0, group=self.tree.group)

    def failed(self, failed: Failed) -> Exception:
        return _error(failed, "Parameters may be written in part")


class InCopies:
    """The writer has whole parameters of its own, which all ranks get their rows of."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._copies: list[tuple[UnitParameter, nn.Parameter]] = []
        self._places = [pair for unit in tree.units() for pair in unit.places]

    def begin(self, writes: bool) -> None:
        for one in self.tree.records():
            whole = whole_of(cast(DTensor, one.sharded))
            if writes:
                copy = nn.Parameter(whole, requires_grad=one.sharded.requires_grad)
                self._copies.append((one, copy))
        copies = {id(one): copy for one, copy in self._copies}
        for place, one in self._places if writes else ():
            place.swap(one.sharded, copies[id(one)])

    def put_back(self, writes: bool) -> None:
        copies = {id(one): copy for one, copy in self._copies}
        for place, one in self._places if writes else ():
            place.swap(copies[id(one)], one.sharded)

    def check(self) -> None:
        for one, copy in self._copies:
            if copy.shape != one.whole.shape:
                raise ValueError(
                    f"parameter {one.name!r}: expected shape {tuple(one.whole.shape)} at the end, "
                    f"got {tuple(copy.shape)}; write values in place"
                )

    def spread(self, writes: bool) -> None:
        copies: list[nn.Parameter | None] = [copy for _, copy in self._copies]
        copies = copies or [None] * len(self.tree.records())
        with torch.no_grad():
            for one, copy in zip(self.tree.records(), copies, strict=True):
                sharded = cast(DTensor, one.sharded)
                mine = None if copy is None else copy.detach()
                one.local.copy_(own_shard(told(mine, sharded), sharded))

    def failed(self, failed: Failed) -> Exception:
        return _error(failed, "No parameter has changed on any rank")


def _error(failed: Failed, effect: str) -> Exception:
    return WindowError(
        f"fully_shard: rewrite() failed on rank {failed.rank}, which writes: {failed.kind}: "
        f"{failed.text}. {effect}"
    )


def reset_parameters(module: nn.Module) -> None:
    """Calls ``reset_parameters()`` of all modules that have it, in the order of the module."""
    unit = unit_of(module)
    form = None if unit is None else unit.tree.form
    for one in module.modules():
        reset: Callable[[], None] | None = getattr(one, "reset_parameters", None)
        if callable(reset):
            reset()
            if form is not None:
                form.wrote(list(one.parameters(recurse=False)))
