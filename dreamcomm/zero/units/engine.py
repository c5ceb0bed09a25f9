"""The bucket engine of a tree: gradients are reduced into this rank's rows, in backward passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dreamcomm._torch.groups import ours
from dreamcomm.buckets.averages import Averages
from dreamcomm.buckets.engine import BucketEngine, Caps
from dreamcomm.ranks.parameters import TrainedParameter
from dreamcomm.zero.engine import BUCKET_BYTES, MIB
from dreamcomm.zero.units.parameters.record import UnitParameter

__all__ = ["Reductions", "UnitEngine"]

STAGE = 3


@dataclass(frozen=True)
class Reductions:
    """How gradients of units are reduced.

    Attributes:
        averages: what they become.
        over: a larger group, over which something else finishes the ranks' sums; None: nothing
            does.
        in_heaps: out of memory that other ranks map, where there is such. A rank then waits within
            a pass for others to launch the same, which must not wait for this rank.
    """

    averages: Averages
    over: dist.ProcessGroup | None
    in_heaps: bool


class UnitEngine(BucketEngine):
    """Reduces the gradients of whole parameters, and frees them.

    Args:
        records: the parameters. Buckets go over units' ends: all ranks read one copy, of which no
            unit is freed.
        group: reduces them.
        starting: called before a pass adds to its first gradient, unless it was entered before. A
            weak reference.
        finished: called after each backward pass with whether it has reduced. A weak reference.
        how: the gradients' sums and memory.
    """

    def __init__(
        self,
        records: Sequence[UnitParameter],
        group: dist.ProcessGroup,
        starting: Callable[[], None],
        finished: Callable[[bool], None],
        how: Reductions,
    ) -> None:
        self._how = how
        self.records = list(records)
        self._before_pass = weakref.WeakMethod(starting)
        self._after_pass = weakref.WeakMethod(finished)
        world = dist.get_world_size(group)
        trained = [
            TrainedParameter(
                one.name,
                one.whole,
                factor=1.0 if how.over is not None else _factor(one.divide_factor, world),
                grad_dtype=one.sum_dtype,
            )
            for one in records
        ]
        super().__init__(
            trained,
            group,
            Caps(BUCKET_BYTES, MIB),
            averages=how.averages,
            holds_frozen=True,
            counted_over=how.over,
        )

    def _make(self) -> None:
        super()._make()
        backend = ours(self.group, torch.device("cpu"))
        self.buckets.set_factors([one.factor for one in self.trained])
        dtypes = [one.sum_dtype for one in self.records]
        in_heaps = self._how.in_heaps and backend is not None and backend.shares_heaps
        heaps = backend if in_heaps else None
        self.shard(STAGE, dtypes, [None] * len(dtypes), heaps)

    def _starting(self) -> Callable[[], None] | None:
        """A pass may come to a gradient before it comes to an output of any unit, or to none."""
        me = weakref.ref(self)

        def starting() -> None:
            engine = me()
            before = None if engine is None else engine._before_pass()
            if before is not None:
                before()

        return starting

    def _finished(self) -> Callable[[bool], None] | None:
        me = weakref.ref(self)

        def finished(reduced: bool) -> None:
            engine = me()
            after = None if engine is None else engine._after_pass()
            if after is not None:
                after(reduced)

        return finished

    def reduced(self) -> list[torch.Tensor | None]:
        """This rank's rows of each reduced gradient; None: there is none."""
        assert self.shards is not None
        return self.shards.reduced_as([one.local for one in self.records])

    def memory(self, place: int) -> torch.Tensor | None:
        """This rank's rows of a sum, flat, as the engine has them; None: there is none."""
        assert self.shards is not None
        return self.shards.memory(place)

    def hold(self, flags: Sequence[bool]) -> None:
        """Whether what each shard has is still a gradient of the script."""
        assert self.shards is not None
        self.shards.hold(list(flags))


def _factor(divisor: float, world: int) -> float:
    """The factor of the ranks' sum; 0: it is averaged."""
    return 0.0 if divisor in (0.0, world) else 1.0 / divisor
