"""The bucket engine of a tree: gradients are reduced into this rank's rows, in backward passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from dreamcomm._torch.groups import ours
from dreamcomm.buckets.engine import BucketEngine, Caps
from dreamcomm.ranks.parameters import TrainedParameter
from dreamcomm.zero.engine import BUCKET_BYTES, MIB
from dreamcomm.zero.units.record import UnitParameter

__all__ = ["UnitEngine"]

STAGE = 3


class UnitEngine(BucketEngine):
    """Reduces the gradients of whole parameters, and frees them.

    Args:
        records: the parameters; buckets end where units end.
        group: reduces them.
        finished: called after each backward pass with whether it has reduced. A weak reference.
    """

    def __init__(
        self,
        records: Sequence[UnitParameter],
        group: dist.ProcessGroup,
        finished: Callable[[bool], None],
    ) -> None:
        self.records = list(records)
        self._after_pass = weakref.WeakMethod(finished)
        trained = [TrainedParameter(one.name, one.whole, unit=one.unit) for one in records]
        super().__init__(trained, group, Caps(BUCKET_BYTES, MIB), holds_frozen=True)

    def _make(self) -> None:
        super()._make()
        heaps = ours(self.group, torch.device("cpu"))
        world = dist.get_world_size(self.group)
        divisors = [one.divide_factor for one in self.records]
        self.buckets.set_factors([0.0 if one in (0.0, world) else 1.0 / one for one in divisors])
        dtypes = [one.whole.dtype for one in self.records]
        self.shard(STAGE, dtypes, [None] * len(dtypes), heaps)

    def _finished(self) -> Callable[[bool], None] | None:
        me = weakref.ref(self)

        def finished(reduced: bool) -> None:
            engine = me()
            after = None if engine is None else engine._after_pass()
            if after is not None:
                after(reduced)

        return finished

    def reduced(self) -> list[torch.Tensor | None]:
        """This rank's elements of each reduced gradient, flat; None: there is none."""
        assert self.shards is not None
        return self.shards.reduced()

    def hold(self, flags: Sequence[bool]) -> None:
        """Whether what each shard has is still a gradient of the script."""
        assert self.shards is not None
        self.shards.hold(list(flags))
