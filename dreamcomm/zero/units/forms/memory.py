"""The memory of one unit's whole parameters, while ranks use them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from dreamcomm.buckets.layout import shard_layout
from dreamcomm.zero.units.forms.pool import Pool
from dreamcomm.zero.units.forms.use import UnitUse
from dreamcomm.zero.units.parameters.record import UnitParameter

__all__ = ["DIRECT_BYTES", "UnitMemory", "is_gathered"]

ALIGN = 64
# A rank's rows of so many bytes are gathered straight into place. Below, a copy costs less than a
# collective.
DIRECT_BYTES = 64 << 10


def is_gathered(one: UnitParameter) -> bool:
    """Whether ranks have rows of it alone, and there are any."""
    return not (one.is_replicated or one.is_meta or one.whole.numel() == 0)


class UnitMemory(UnitUse):
    """Gathers the parameters of a unit into a block of a pool, and frees it.

    Args:
        name: of the unit, for errors.
        number: of the unit in its tree, the same on all ranks.
        records: its parameters.
        pool: of the tree.
        group: gathers.
    """

    def __init__(
        self,
        name: str,
        number: int,
        records: Sequence[UnitParameter],
        pool: Pool,
        group: dist.ProcessGroup,
    ) -> None:
        from dreamcomm import _C

        super().__init__(number)
        self.name = name
        self._pool = pool
        wanted = [one for one in records if is_gathered(one)]
        self._wholes: list[Tensor] = [one.whole for one in wanted]
        self._rows = [one.sent for one in wanted]
        world = dist.get_world_size(group)
        self._offsets: list[int] = []
        self.nbytes = 0
        places = []
        for one in wanted:
            each = bytes_each(tuple(one.whole.shape), world, one.whole.dtype.itemsize)
            self._offsets.append(self.nbytes)
            places.append((self.nbytes, one.whole.nbytes, each, each >= DIRECT_BYTES))
            self.nbytes += -(-each * world // ALIGN) * ALIGN
        self._gather = _C.UnitGather(group, number, places, list(range(world)))
        self._block: Tensor | None = None
        self._is_ready = False

    @property
    def received(self) -> int:
        """Bytes of other ranks, in all."""
        return self._gather.received

    @property
    def notes(self) -> list[int]:
        """The notes of all ranks at the last gather that has ended."""
        return self._gather.notes

    def start(self, note: int) -> None:
        """Begins to gather, unless it has, with a number for the other ranks. Collective."""
        if self._block is None:
            self._block = self._pool.take(self.nbytes)
            self._gather.start(self._block, self._rows, note)

    def finish(self) -> list[int]:
        """Waits until the whole parameters are there. Gives the number of each rank's unit."""
        from dreamcomm import _C

        if self._is_ready:
            return [self.number]
        assert self._block is not None
        numbers = self._gather.wait()
        if all(one == self.number for one in numbers):
            _C.lend(self._wholes, self._block, self._offsets)
            self._is_ready = True
        return numbers

    def free(self) -> None:
        """Takes the memory from the parameters; views that autograd has saved get it back later."""
        from dreamcomm import _C

        if self._block is None:
            return
        self._gather.drop()
        _C.take_back(self._wholes)
        self._pool.give(self._block)
        self._block, self._is_ready, self.is_kept = None, False, False


def bytes_each(shape: tuple[int, ...], world: int, itemsize: int) -> int:
    """Bytes of rank 0's rows of a parameter: no rank has more."""
    (piece,) = shard_layout([shape], world, 0)
    return piece.numel * itemsize
