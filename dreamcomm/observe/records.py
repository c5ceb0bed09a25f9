"""What a rank notes of its operations, as objects.

A rank notes an operation while a log is kept (``Options(log=True)``) or a trace runs. Times are
nanoseconds of CLOCK_MONOTONIC, which is one for all processes of a host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dreamcomm._C import Recorder

__all__ = ["MESSAGES", "Line", "Record", "size_of_call", "world_rank"]

MESSAGES = ("send", "recv")
IN_BLOCKS = ("all_gather", "gather", "scatter", "reduce_scatter")
PARTS = (*IN_BLOCKS, "all_to_all")


@dataclass(frozen=True)
class Record:
    """One collective or message, as one rank saw it.

    Attributes:
        number: of the collective in its group, equal on all ranks; of a message, its place
            among those from its sender to its receiver, from 0 on. A receive that failed before
            it met a message has 0.
        operation, dtype, op, root: of the call.
        nbytes: of one block; for all_to_all of the whole input; of a message.
        state: "running", "done" or "failed".
        algorithm: the table's row, once it is done.
        entered, arrived, ended: when this rank came, when the last rank came, and when it was
            over here; 0: not yet, or not known.
        peer: the rank that came last; of a message, the other side; -1: not known.
        in_place: whether tensors in the shared heap were used where they lie.
    """

    number: int
    operation: str
    nbytes: int
    dtype: str
    op: str
    root: int
    state: str
    algorithm: str
    entered: int
    arrived: int
    ended: int
    peer: int
    in_place: bool

    @classmethod
    def of(cls, fields: tuple[Any, ...]) -> Record:
        return cls(*fields)


@dataclass(frozen=True)
class Line:
    """All operations of one kind and size of a rank. Times in nanoseconds.

    Attributes:
        nbytes: as in :class:`Record`; -1: the operation's sizes beyond the first 64.
        calls, failed: how many were done, and failed.
        total: of the calls' durations.
        waited: of that, for the last rank to come; 0 for messages, of which it is not known.
        p50, p99: of the durations, to 6 %.
        in_place: calls on tensors in the shared heap, without a copy.
        slowest, for_slowest: the rank that was waited for longest in all, and how long; -1: none.
    """

    operation: str
    nbytes: int
    calls: int
    failed: int
    total: int
    waited: int
    p50: int
    p99: int
    in_place: int
    slowest: int
    for_slowest: int

    @classmethod
    def of(cls, fields: tuple[Any, ...]) -> Line:
        return cls(*fields)

    def algbw(self, world: int) -> float:
        """Bytes of the call's largest tensor over the mean duration, in GB/s; 0: not known."""
        if self.nbytes <= 0 or self.total <= 0:
            return 0.0
        return size_of_call(self.operation, self.nbytes, world) * self.calls / self.total

    def busbw(self, world: int) -> float:
        """algbw times nccl-tests' factor of the operation, in GB/s."""
        if self.operation == "all_reduce":
            return self.algbw(world) * 2 * (world - 1) / world
        if self.operation in PARTS:
            return self.algbw(world) * (world - 1) / world
        return self.algbw(world)


def size_of_call(operation: str, nbytes: int, world: int) -> int:
    """nccl-tests' size of a call whose block has ``nbytes``: of its largest tensor."""
    return nbytes * world if operation in IN_BLOCKS else nbytes


def world_rank(recorder: Recorder, rank: int) -> int:
    """The rank in the job of the group's ``rank``."""
    ranks = recorder.world_ranks
    return ranks[rank] if 0 <= rank < len(ranks) else rank
