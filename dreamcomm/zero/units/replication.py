"""Sums of gradients that are finished after they are reduced into rows.

    shards      reduce-scatter: each rank's rows of the sum of its own group
    replicas    all-reduce: of all ranks' sum, where the parameters are replicated
    hook        changes the sum, as set_all_reduce_hook() says
    scale       by the number of ranks, or the unit's factor

Each unit's rows lie in one flat tensor meanwhile, which is what the hook gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.zero.units.parameters.record import UnitParameter

__all__ = ["Finishing", "UnitSums"]

Rows = dict[int, Tensor]  # by the ids of parameters


@dataclass(frozen=True)
class UnitSums:
    """How sums of a unit are finished.

    Attributes:
        records: the parameters that count as the unit's.
        all_reduces: whether they are summed over the replicas now.
        hook: changes them then, or None.
    """

    records: Sequence[UnitParameter]
    all_reduces: bool
    hook: Callable[[Tensor], None] | None


class Finishing:
    """Finishes sums of gradients.

    Args:
        units: all of a tree.
        replicas: None: rows are finished, and hooks change them alone.
        divisor: gives what sums over all ranks are divided by; None: their number, or the unit's
            factor.
    """

    def __init__(
        self,
        units: Sequence[UnitSums],
        replicas: dist.ProcessGroup | None,
        divisor: Callable[[], float] | None = None,
    ) -> None:
        self._units, self._replicas, self._divisor = units, replicas, divisor

    def has_partial(self, records: Sequence[UnitParameter]) -> bool:
        """Whether any replica has rows that wait for the others'. Collective over them."""
        return any(self._anywhere([one.is_partial for one in records]))

    def _anywhere(self, mine: list[bool]) -> list[bool]:
        from dreamcomm import _C

        return mine if self._replicas is None else list(_C.any_of(self._replicas, mine))

    def finished(
        self, records: Sequence[UnitParameter], sums: Sequence[Tensor | None], ends: bool
    ) -> list[Tensor | None]:
        """The gradients' rows; None: there is none, or it waits. Collective over the replicas.

        Args:
            records: of the sums.
            sums: over the shards, of this and earlier passes.
            ends: also those that units hold back.
        """
        anywhere = self._anywhere([one is not None for one in sums])
        rows = {
            id(one): own if own is not None else _zeros(one)
            for one, own, is_there in zip(records, sums, anywhere, strict=True)
            if is_there
        }
        flats: list[_Flat] = []
        for unit in self._units:
            mine = [one for one in unit.records if id(one) in rows]
            waits = self._replicas is not None and not (unit.all_reduces or ends)
            for one in mine:
                one.is_partial = waits
            for dtype in () if waits else dict.fromkeys(rows[id(one)].dtype for one in mine):
                of_type = [one for one in mine if rows[id(one)].dtype == dtype]
                flats.append(_Flat(of_type, rows, unit.hook))
        self._sum(flats)
        found = {key: value for flat in flats for key, value in flat.rows().items()}
        return [found.get(id(one)) for one in records]

    def _sum(self, flats: Sequence[_Flat]) -> None:
        if self._replicas is not None:
            works = [
                dist.all_reduce(one.flat, group=self._replicas, async_op=True) for one in flats
            ]
            for work, one in zip(works, flats, strict=True):
                if work is not None:
                    work.wait()
                if self._divisor is None:
                    one.scale()
                else:
                    one.flat.div_(self._divisor())
        for one in flats:
            if one.hook is not None:
                one.hook(one.flat)


def _zeros(one: UnitParameter) -> Tensor:
    local = one.local
    made = torch.empty_strided(local.shape, local.stride(), dtype=one.sum_dtype, device="cpu")
    return made.zero_()


class _Flat:
    """Some sums of a unit, in one tensor."""

    def __init__(
        self,
        records: Sequence[UnitParameter],
        rows: Rows,
        hook: Callable[[Tensor], None] | None,
    ) -> None:
        self._records, self.hook = records, hook
        self._likes = [rows[id(one)] for one in records]
        self.flat = torch.cat([_in_order(one) for one in self._likes])

    def _views(self) -> list[Tensor]:
        return list(torch.split(self.flat, [one.numel() for one in self._likes]))

    def scale(self) -> None:
        for one, view in zip(self._records, self._views(), strict=True):
            ranks = one.spec.mesh.size()
            if one.divide_factor in (0.0, float(ranks)):
                view.div_(ranks)
            else:
                view.mul_(1.0 / one.divide_factor)

    def rows(self) -> Rows:
        """Each one's, with a storage of its own part alone in view."""
        return {
            id(one): view.as_strided(like.shape, like.stride())
            for one, view, like in zip(self._records, self._views(), self._likes, strict=True)
        }


def _in_order(rows: Tensor) -> Tensor:
    return rows.as_strided((rows.numel(),), (1,))
