"""A rank's records of its operations, as objects.

A rank records operations while a log is kept (``Options(log=True)``) or a trace runs. Times are
nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
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
        number: the number of a collective in its group, equal on all ranks; the number of a
            message among those from its sender to its receiver, from 0 on. A receive that failed
            before it was matched has 0.
        operation, dtype, op, root: as in the call.
        nbytes: bytes of one block; for all_to_all of the whole input; for a message of all.
        state: "running", "done" or "failed".
        algorithm: the table's row, once the call is done.
        entered, arrived, ended: when this rank entered, when the last rank entered, and when the
            call ended here; 0: not yet, or not known.
        peer: the rank that entered last; the other side of a message; -1: not known.
        in_place: whether tensors in the shared heap were used without a copy.
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
        calls, failed: the numbers of successful and of failed calls.
        total: the sum of the calls' durations.
        waited: the part of ``total`` before the last rank entered; 0 for messages, where it is not
            known.
        p50, p99: percentiles of the durations, within 6 %.
        in_place: the number of calls on tensors in the shared heap, without a copy.
        slowest, for_slowest: the rank that was waited for longest in total, and how long; -1: none.
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
    """The size of a call in nccl-tests, the bytes of its largest tensor; a block has ``nbytes``."""
    return nbytes * world if operation in IN_BLOCKS else nbytes


def world_rank(recorder: Recorder, rank: int) -> int:
    """The rank in the job of the group's ``rank``."""
    ranks = recorder.world_ranks
    return ranks[rank] if 0 <= rank < len(ranks) else rank
