"""The loop over a rank's shards of a step, with the same bits at every world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.invariant.agreement import check_equal, check_threads
from dreamcomm.invariant.checks import ChangedBuffers
from dreamcomm.invariant.running_statistics import RunningStatistics
from dreamcomm.invariant.seeds import Purpose, own_random_state, seed_of
from dreamcomm.ranks.agree import gather_objects

__all__ = ["ShardLoop", "ShardedPasses", "loop_of", "sum_along_tree"]


class ShardedPasses(Protocol):
    """What a loop drives: backward passes whose gradients are sums over shards."""

    def begin_shards(self) -> None:
        """Begins a step, whose shards begin without gradients. Collective."""

    def begin_shard(self, *, is_last: bool) -> None:
        """Before a shard's passes; the last one's backward pass reduces."""

    def end_shard(self) -> None:
        """After them."""

    def leave_shards(self) -> None:
        """After the last shard, or an error."""


class ShardLoop:
    """What ``model.shards`` is: called, it loops over this rank's shards of a step.

    A step is one forward and one backward pass on each of ``shards`` shards, of which rank r runs
    those from r * shards / world_size on. Each begins without gradients, and with torch's random
    numbers seeded by (seed, step, shard). Gradients are added along one binary tree by the shard's
    number, and divided once. In the end the caller has its random state back.

    Attributes:
        shards: of all ranks in each step.
        local: the numbers of this rank's.
        seed: of random numbers.
        step: how many steps are done.
        threads: that compute, the same in all runs whose bits are compared.
        is_running: a step has begun, and has not ended.

    Args:
        passes: makes the gradients.
        find: gives the module that is trained.
        group: its ranks have the shards.
        shards: a power of two that the number of ranks divides.
        seed: the same on all ranks.
        what: the way of training, for errors.
    """

    def __init__(
        self,
        passes: Callable[[], ShardedPasses],
        find: Callable[[], nn.Module],
        group: dist.ProcessGroup,
        shards: int,
        seed: int,
        what: str,
    ) -> None:
        self._passes, self._find, self._group, self._what = passes, find, group, what
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        per_rank = shards // world
        self.shards, self.local = shards, range(rank * per_rank, (rank + 1) * per_rank)
        self.seed, self.step, self.threads = seed, 0, torch.get_num_threads()
        self.is_running = False
        self._has_agreed = False
        self._has_compared = False  # what the first step's passes leave of buffers

    @property
    def _who(self) -> str:
        return f"{self._what} on rank {dist.get_rank(self._group)}"

    def __call__(self) -> Iterator[int]:
        """The numbers of this rank's shards, one after the other. Collective.

        Each needs one backward pass. What was left of an earlier loop is dropped.

        Raises:
            RuntimeError: the ranks differ in their step, seed or threads; this process computes
                with another number of threads than before; a gradient is there already; a shard
                ran no backward pass, or two.
        """
        check_threads(self.threads, self._who)
        if not self._has_agreed:
            check_equal(self._group, self.state_dict(), self._what)
            self._has_agreed = True
        return self._run()

    def _run(self) -> Iterator[int]:
        passes, module = self._passes(), self._find()
        statistics = RunningStatistics(module)
        buffers = ChangedBuffers(module, self._who, compares=not self._has_compared)
        passes.begin_shards()
        buffers.note()
        self.is_running = True
        try:
            with own_random_state(), statistics.step():
                for shard in self.local:
                    passes.begin_shard(is_last=shard == self.local[-1])
                    seed = seed_of(self.seed, Purpose.TRAINING, self.step, shard)
                    torch.default_generator.manual_seed(seed)
                    with statistics.at(shard):
                        yield shard
                    passes.end_shard()
            buffers.check(self._group)
            self._has_compared = True
            statistics.commit(self._group, self.local, self.shards)
        finally:
            self.is_running = False
            passes.leave_shards()
        self.step += 1

    def mean(self, losses: Tensor | Sequence[Tensor | float]) -> Tensor:
        """The mean of all shards' losses, the same on all ranks. Collective.

        Args:
            losses: of this rank's shards, in order; or one, where a rank has one shard.

        Returns:
            A tensor of no dimension, in the losses' dtype; added in float64 along the tree.

        Raises:
            ValueError: there are more or fewer losses than shards, on any rank.
        """
        values = [losses] if isinstance(losses, Tensor) and losses.dim() == 0 else list(losses)
        dtypes = [one.dtype for one in values if isinstance(one, Tensor)]
        everyone = gather_objects(self._group, [float(one) for one in values])
        for rank, found in enumerate(everyone):
            if len(found) != len(self.local):
                raise ValueError(
                    f"{self._what}.mean(): expected a loss of each of {len(self.local)} shards, "
                    f"got {len(found)} from rank {rank}"
                )
        total = sum_along_tree([one for found in everyone for one in found])
        dtype = dtypes[0] if dtypes else torch.float32
        return torch.tensor(total / self.shards, dtype=dtype, device="cpu")

    def state_dict(self) -> dict[str, int]:
        """What a run goes on from, at any world size that divides the number of shards."""
        return {
            "shards": self.shards,
            "step": self.step,
            "seed": self.seed,
            "threads": self.threads,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, on all ranks.

        Raises:
            ValueError: it is of another number of shards.
            RuntimeError: it is of another number of threads than this process has.
        """
        if int(state["shards"]) != self.shards:
            raise ValueError(
                f"{self._who}: expected a state of {self.shards} shards, as invariant_shards= "
                f"says, got one of {state['shards']}"
            )
        check_threads(int(state["threads"]), self._who)
        self.step, self.seed = int(state["step"]), int(state["seed"])
        self.threads = int(state["threads"])
        self._has_agreed = False


def sum_along_tree(values: Sequence[float]) -> float:
    """Adds neighbours, then neighbours of these sums; as many values as a power of two."""
    sums = list(values)
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def loop_of(loop: ShardLoop | None, what: str) -> ShardLoop:
    """The loop, if there is one.

    Raises:
        RuntimeError: there is none.
    """
    if loop is None:
        raise RuntimeError(f"{what}: shards() and mean() need invariant_shards=")
    return loop
