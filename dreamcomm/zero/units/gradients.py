"""Gradients of a tree: summed in whole parameters, and shown on the DTensors.

whole.grad      this rank's own sum, until it is reduced; then None
sharded.grad    Shard(0): this rank's rows of the reduced sum, on the sum's own memory; or a copy,
                where sums are of another type
                Partial(): this rank's own sum, under no_sync()
                None: cleared; what was summed before counts no more
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from dreamcomm.ranks.pieces import in_memory_order
from dreamcomm.zero.units.engine import Reductions, UnitEngine
from dreamcomm.zero.units.parameters.record import UnitParameter
from dreamcomm.zero.units.replication import Finishing

__all__ = ["after_pass", "before_pass", "drop_unfinished", "make_engine"]


def make_engine(
    records: Sequence[UnitParameter],
    group: dist.ProcessGroup,
    starting: Callable[[], None],
    finished: Callable[[bool], None],
    how: Reductions,
) -> UnitEngine:
    """An engine whose shards have nothing yet: gradients that are there count as the script's."""
    for one in records:
        one.shown, one.is_partial = None, False
    return UnitEngine(records, group, starting, finished, how)


def before_pass(engine: UnitEngine) -> None:
    """Notices what the script has done with gradients since the last pass."""
    holds = []
    for place, one in enumerate(engine.records):
        now = one.sharded.grad
        one.given = None
        hides, one.hides_own = one.hides_own, False
        if hides and now is not None and _is_zeroed(now):
            one.whole.grad = None  # with the sum that it hides
        if now is None:
            if one.shown is not None or one.partial is not None:
                one.whole.grad = one.shown = one.partial = None  # cleared, with what is not shown
        elif one.casts_sums and _is_changed_copy(one, now, engine.memory(place)):
            _take_copy(one, now)
        elif now is not one.shown and now is not one.partial:
            one.given, one.shown = now, None
        elif now is one.shown and not one.shown_is_sum:
            one.given, one.shown = now, None  # finished: what comes is added to it
        holds.append(one.is_partial or (now is not None and now is one.shown))
    engine.hold(holds)
    if engine.averages.counted:
        _tell_of_cleared(engine)


def _tell_of_cleared(engine: UnitEngine) -> None:
    """Has the engine see which gradients are cleared, and count no more.

    Zeros that a pass has left are a gradient. A script may write zeros to a DTensor without a count
    of its version, or of that of the sum below it.
    """
    for one in engine.records:
        own = one.partial if one.sharded.grad is one.partial else None
        if own is None or one.whole.grad is None or own._version == one.left_zero:
            continue
        if _is_zeroed(own):
            increment_version([one.whole.grad])
    given = [one.given for one in engine.records if one.given is not None]
    if not all(map(_is_zeroed, given)):
        engine.buckets.note_kept()


def _is_zeroed(gradient: Tensor) -> bool:
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    if local.numel() > 0 and bool(local[(0,) * local.dim()]):
        return False
    return not local.any()


def _is_changed_copy(one: UnitParameter, now: Tensor, memory: Tensor | None) -> bool:
    """Whether a script has written to what it sees of a sum in another type.

    Values tell, as not all writes to a DTensor count up a version.
    """
    own = one.partial is not None and now is one.partial
    total = one.whole.grad if own else memory if now is one.shown else None
    if total is None or not isinstance(now, DTensor):
        return False
    seen = in_memory_order(now._local_tensor)
    return not torch.equal(seen, in_memory_order(total).to(seen.dtype))


def _take_copy(one: UnitParameter, now: Tensor) -> None:
    if one.partial is not None and now is one.partial:
        with torch.no_grad():
            one.whole.grad = one.partial._local_tensor.to(one.sum_dtype)
    else:
        one.given, one.shown = now, None


def drop_unfinished(records: Sequence[UnitParameter]) -> None:
    """Forgets what a pass that an error has ended has left in whole parameters."""
    for one in records:
        one.whole.grad, one.is_partial = None, False
        if one.partial is not None and one.sharded.grad is one.partial:
            one.sharded.grad = one.partial = None


def after_pass(
    engine: UnitEngine, reduced: bool, finishing: Finishing | None, ends: bool = False
) -> None:
    """Shows what a pass has left. Runs the DTensors' hooks where it has reduced.

    Args:
        engine: has reduced it.
        reduced: whether it has.
        finishing: what is done with the rows. Collective over the replicas.
        ends: also with what was held back from it.
    """
    if not reduced:
        if not engine.averages.shards:  # a shard's gradients are put aside
            _show_own(engine)
        return
    found = []
    with torch.no_grad():
        sums = [
            _sum_of(one, rows) for one, rows in zip(engine.records, engine.reduced(), strict=True)
        ]
        if finishing is not None:
            sums = finishing.finished(engine.records, sums, ends)
        for one, rows in zip(engine.records, sums, strict=True):
            if rows is not None:
                _show(one, rows, finishing is None)
                found.append(one)
    for one in found:
        for hook in list((one.sharded._post_accumulate_grad_hooks or {}).values()):
            hook(one.sharded)


def _sum_of(one: UnitParameter, rows: Tensor | None) -> Tensor | None:
    if rows is None and one.whole.numel() == 0 and one.whole.grad is not None:
        rows, one.whole.grad = torch.empty_like(one.local), None  # nothing to reduce
    return rows


def _show(one: UnitParameter, rows: Tensor, is_sum: bool) -> None:
    """``is_sum``: rows are the engine's, which adds to them later."""
    now = one.sharded.grad
    if one.given is None and now is not one.shown and now is not one.partial:
        one.given = now  # by this pass, in which the script has used the DTensor, too
    gradient = one.gradient(rows)
    one.shown_is_sum = is_sum
    if one.given is not None:
        gradient._local_tensor.add_(_rows_of(one, one.given))
        one.given = None
    one.partial = None
    one.sharded.grad = gradient


def _show_own(engine: UnitEngine) -> None:
    for one in engine.records:
        own = one.whole.grad
        now = one.sharded.grad
        if own is not None and (now is None or now is one.partial):
            one.sharded.grad = shown = one.own_sum(own)
            if engine.averages.counted:
                one.left_zero = shown._version if _is_zeroed(shown) else None
        elif own is not None and now is not None:
            one.hides_own = not _is_zeroed(now)


def _rows_of(one: UnitParameter, gradient: Tensor) -> Tensor:
    """This rank's rows of a gradient that the script has put there."""
    if isinstance(gradient, DTensor):
        return gradient.redistribute(one.spec.mesh, one.spec.placements).to_local()
    return gradient
