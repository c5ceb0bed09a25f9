"""Steps of an engine that are loops over shards: what dreamcomm/invariant/loop.py drives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from dreamcomm.buckets.averages import Averages

if TYPE_CHECKING:
    from dreamcomm._C import BackwardPass

__all__ = ["ShardSteps", "refuse_accumulation"]


class ShardSteps:
    """Begins and ends the shards of a step, and refuses what comes between.

    Attributes:
        averages: what gradients become.
        group: its ranks have the shards.
        backward: the compiled pass.
        sync: whether backward passes reduce.
    """

    averages: Averages
    group: dist.ProcessGroup
    backward: BackwardPass

    @property
    def sync(self) -> bool:
        raise NotImplementedError

    @sync.setter
    def sync(self, value: bool) -> None:
        raise NotImplementedError

    def begin_shards(self) -> None:
        self.backward.begin_shards()

    def begin_shard(self, *, is_last: bool) -> None:
        self.sync = is_last
        self.backward.begin_shard()

    def end_shard(self) -> None:
        self.backward.end_shard()

    def leave_shards(self) -> None:
        self.sync = True
        self.backward.leave_shards()

    def check_shards(self, what: str) -> None:
        """Raises RuntimeError where ``what`` comes within a step whose shards are not all done."""
        missing = self.backward.missing_shards()
        if missing:
            local = self.averages.shards // dist.get_world_size(self.group)
            raise RuntimeError(
                f"rank {dist.get_rank(self.group)}: {what} while {missing} of this rank's {local} "
                "shards of the step are missing: end the loop over the module's shards() first"
            )

    def refuse_accumulation(self, what: str) -> None:
        """Raises RuntimeError where shards of a step are all that accumulates."""
        refuse_accumulation(self.averages, self.group, what)


def refuse_accumulation(averages: Averages, group: dist.ProcessGroup, what: str) -> None:
    """Raises RuntimeError where shards of a step are all that accumulates."""
    if averages.shards:
        raise RuntimeError(
            f"rank {dist.get_rank(group)}: {what} is not supported with invariant_shards=: a "
            "step's shards are its accumulation, and the last one's backward pass reduces. Give "
            "more shards"
        )
