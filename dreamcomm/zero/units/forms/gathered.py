"""Each rank keeps its rows, and ranks gather a unit's whole parameters while it computes.

    forward    | gather 0 | 0: compute, gather 1 | 1: compute, gather 2, free 0 | ...
    backward   | gather 2 | 2: compute, gather 1 | 1: compute, gather 0, free 2 | ...

INVARIANT: a whole parameter has memory from before its unit's pass on until after it, in forward
and in backward passes. Tensors that autograd has saved are on the parameter's storage, which gets
other memory with the same values, so that their versions stay as they are.

Gradients are reduced in a group of their own, as their order depends on which ones a rank has. So a
rank may wait for a unit that another gathers later, and that one for a reduction that this rank has
not launched: within a pass a rank waits for those reductions alone that all ranks have launched, as
they tell each other when they gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm._torch.groups import group_like, ours
from dreamcomm.buckets.layout import is_replicated
from dreamcomm.memory import empty
from dreamcomm.zero.units.forms.freeing import Freeing
from dreamcomm.zero.units.forms.memory import UnitMemory
from dreamcomm.zero.units.forms.pool import Pool
from dreamcomm.zero.units.parameters.placed import Placed, Source
from dreamcomm.zero.units.parameters.record import UnitParameter
from dreamcomm.zero.units.parameters.region import place_scalar
from dreamcomm.zero.units.window import WindowError

__all__ = ["Gathered"]

T = TypeVar("T")


class Gathered(Freeing[UnitMemory]):
    """The ranks may be on any hosts, and the group of any backend for CPUs."""

    gathers = True

    def __init__(self, group: dist.ProcessGroup, why: str = "") -> None:
        super().__init__(group, why)
        self.pool = Pool(self._new_block)
        self._reductions: dist.ProcessGroup | None = None
        self._pokes: list[dist.Work | None] = []

    @property
    def largest_use(self) -> int:
        return self.pool.most_bytes

    def described(self) -> str:
        return (
            f"parameters are gathered by units: {self.why}; at most {self.pool.most} units at a "
            f"time, {self.pool.most_bytes:,d} bytes; {self.received:,d} bytes received"
        )

    @property
    def received(self) -> int:
        """Bytes of parameters that this rank has got from others, in all."""
        own = {id(needs[0]): needs[0] for needs in self._needs.values()}
        return sum(one.received for one in own.values())

    # Where parameters lie.

    def _new_block(self, nbytes: int) -> Tensor:
        return self._new(nbytes, torch.uint8)

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """In memory that the group's collectives read and write in place, where it has such."""
        backend = ours(self.group, torch.device("cpu"))
        if backend is not None and backend.shares_memory:
            return empty(numel, dtype=dtype)
        return torch.empty(numel, dtype=dtype, device="cpu")

    def place(self, sources: Sequence[Source]) -> list[Placed]:
        return [
            place_scalar(one, self.group) if is_replicated(one.shape) else self._place(one)
            for one in sources
        ]

    def _place(self, source: Source) -> Placed:
        sent = self._new_rows(source)
        rows = sent
        if source.is_cast:
            shape, dtype = source.rows.shape, source.rows.dtype
            rows = torch.empty_strided(shape, source.strides, dtype=dtype, device="cpu")
        rows.copy_(source.rows.detach())
        whole = torch.empty_strided(source.shape, source.strides, dtype=source.dtype, device="cpu")
        whole.untyped_storage().resize_(0)
        return Placed(whole, rows, sent)

    def _new_rows(self, source: Source) -> Tensor:
        memory = self._new(source.rows.numel(), source.dtype)
        made = torch.empty(0, dtype=source.dtype, device="cpu")  # no view of autograd
        return made.set_(memory.untyped_storage(), 0, source.rows.shape, source.strides)

    def _make_use(self, number: int, records: Sequence[UnitParameter]) -> UnitMemory:
        name = self._units[number].name
        return UnitMemory(name, number, records, self.pool, self.group)

    def reductions(self) -> dist.ProcessGroup:
        if self._reductions is None:
            self._reductions = group_like(self.group, desc="reductions of fully_shard")
        return self._reductions

    # Passes.

    def _start(self, use: UnitMemory) -> None:
        launched = 0 if self.engine is None else self.engine.backward.launched()
        self._told(use, lambda: use.start(launched))

    def _has_begun(self, needs: Sequence[UnitMemory]) -> None:
        """Frees gradients of buckets that all ranks have launched: more than two wait seldom."""
        notes = [one.notes for one in needs if one.notes]
        if self.engine is not None and notes:
            self.engine.backward.await_launched(min(map(min, notes)))

    def _finish(self, use: UnitMemory) -> None:
        numbers = self._told(use, use.finish)
        if any(one != use.number for one in numbers):
            raise WindowError(
                f"{self._who()}: the ranks gather different units: "
                + ", ".join(
                    f"rank {rank} {self._units[one].name!r}" for rank, one in enumerate(numbers)
                )
                + f". {SAME}"
            )

    def _told(self, memory: UnitMemory, act: Callable[[], T]) -> T:
        """Errors of the group name the unit."""
        try:
            return act()
        except RuntimeError as error:
            if isinstance(error, WindowError):
                raise
            raise WindowError(
                f"{self._who()}: the parameters of unit {memory.name!r} could not be gathered: "
                f"{error}. {SAME}"
            ) from error

    def _who(self) -> str:
        return f"fully_shard: rank {self.group.rank()} of {self.group.size()}"

    def poke(self) -> None:
        """Ends reductions in which other ranks wait for this one, by a call that differs."""
        if self._reductions is not None:
            mine = torch.zeros(3, dtype=torch.uint8, device="cpu")
            everyone = [mine.clone() for _ in range(self.group.size())]
            work = dist.all_gather(everyone, mine, group=self._reductions, async_op=True)
            self._pokes.append(work)  # not waited for: it may never end

    def reset(self) -> None:
        super().reset()
        self._reductions = None  # ranks have made different calls in it


SAME = (
    "All ranks run the same units in the same order, also those whose outputs a rank does not "
    "need. After this error call reset_iter_state() on all ranks"
)
