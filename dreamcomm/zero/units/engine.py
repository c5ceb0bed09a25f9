"""The bucket engine of a tree: gradients are reduced into this rank's rows, in backward passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from dreamcomm._torch.groups import ours
from dreamcomm.buckets.engine import BucketEngine, Caps, thawed
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
        starting: called before autograd adds to any of the gradients. A weak reference.
        finished: called after each backward pass with whether it has reduced. A weak reference.
    """

    def __init__(
        self,
        records: Sequence[UnitParameter],
        group: dist.ProcessGroup,
        starting: Callable[[], None],
        finished: Callable[[bool], None],
    ) -> None:
        self.records = list(records)
        self._before_pass = weakref.WeakMethod(starting)
        self._after_pass = weakref.WeakMethod(finished)
        self._starts: list[RemovableHandle] = []
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
        self._starts = self._hook_starts()

    def detach(self) -> None:
        super().detach()
        for one in self._starts:
            one.remove()
        self._starts = []

    def _hook_starts(self) -> list[RemovableHandle]:
        """A pass may come to a gradient before it comes to an output of any unit, or to none."""
        me = weakref.ref(self)

        def before_gradient(_: object) -> None:
            engine = me()
            starting = None if engine is None else engine._before_pass()
            if starting is not None:
                starting()

        wholes = [one.whole for one in self.records]
        with thawed(wholes):
            nodes = [get_gradient_edge(one).node for one in wholes]
        return [node.register_prehook(before_gradient) for node in nodes]

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
