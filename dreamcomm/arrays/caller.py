"""What all verbs of a communicator share: checks, refusals, and calls under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch.distributed as dist

from dreamcomm.arrays.calls import Call, Carrier, Issued
from dreamcomm.arrays.handles import PendingCalls, Running
from dreamcomm.arrays.operations import OPERATIONS, Operation, number_of
from dreamcomm.arrays.targets import Target
from dreamcomm.arrays.trees.calls import tree_call
from dreamcomm.arrays.views import View, is_on_accelerator

__all__ = ["Caller", "Planned", "collective", "nothing"]


class Planned(NamedTuple):
    """A call whose arguments are good.

    Attributes:
        issue: begins it, asynchronously or not.
        finish: called once after it; returns what the caller gets.
        reads: the arrays that it reads where they are, with the names of the arguments.
        writes: the caller's arrays that it writes.
        prepare: called before it; may read what ``reads`` names.
    """

    issue: Callable[[bool], Issued]
    finish: Callable[[], Any]
    reads: Sequence[tuple[str, View]] = ()
    writes: Sequence[View] = ()
    prepare: Callable[[], None] | None = None


def collective(carrier: Carrier, call: Call, given: View, target: Target | None) -> Planned:
    """Plans a call on the arrays of a user. Raises RuntimeError if no backend serves them."""
    if not carrier.in_core(call.some):
        carrier.backend_for(call.some)
    reads = [] if call.input is None else [("array", given)]
    finish = nothing if target is None else target.finish
    writes = [] if target is None or target.view is None else [target.view]
    return Planned(lambda later: carrier.issue(call, later), finish, reads, writes)


class Caller:
    """A rank of a group that makes calls on arrays.

    Attributes:
        rank: this process's, from 0 on.
        size: the number of ranks.
    """

    def __init__(self, carrier: Carrier, pending: PendingCalls | None = None) -> None:
        backend = carrier.backend
        self.rank: int = backend.rank()
        self.size: int = backend.size()
        self._carrier = carrier
        self._door = carrier.door
        self._pending = PendingCalls() if pending is None else pending
        # For quick_all_reduce(); None when closed, or after an untold refusal.
        self._quick: object = (self._door.door, self._pending.calls, OPERATIONS, np.ndarray)
        self._closed = False
        self._untold = ""  # a call that this rank has refused, and could not tell the others

    def _require_open(self, is_collective: bool = True) -> None:
        """Raises ValueError if it is closed, RuntimeError if the ranks' calls would not meet."""
        if self._closed:
            raise ValueError("the communicator is closed")
        if is_collective and self._untold:
            raise RuntimeError(
                f"rank {self.rank} of {self.size}: this rank has refused a call before, and the "
                "others could not be told, as they are for arrays of the CPU in shared memory: its "
                f"next call would meet their last one. Make a new group. It was {self._untold}"
            )

    def _run(
        self,
        verb: str,
        array: Any,
        plan: Callable[[], Planned],
        async_op: bool,
        *,
        is_collective: bool = True,
    ) -> Any:
        """Makes a call that ``plan`` describes. What it refuses is refused on all ranks.

        ``array``: as the caller gave it. Calls on an accelerator's arrays are in an order of their
        own, in which a refusal cannot be told.
        """
        self._require_open(is_collective)
        can_tell = is_collective and not is_on_accelerator(array)
        try:
            planned = plan()
            self._pending.check(planned.reads, planned.writes)
            if planned.prepare is not None:
                planned.prepare()
        except Exception as error:
            self._refuse(verb, error, is_collective, can_tell)
        try:
            issued = planned.issue(async_op)
        except dist.DistError:
            raise
        except Exception as error:
            self._refuse(verb, error, is_collective, can_tell)
        if not async_op:
            return planned.finish()
        for view in planned.writes:
            if view.memory is None and view.written is not None:
                view.written()  # autograd counts a write when it begins, too
        running: Running[Any] = Running(issued, planned.finish)
        reads = [one for _, one in planned.reads]
        return self._pending.add(self._carrier, verb, running, reads, planned.writes)

    def _refuse(
        self, verb: str, error: Exception, is_collective: bool = True, can_tell: bool = True
    ) -> NoReturn:
        """Raises the error of a call that this rank does not make, and tells the other ranks."""
        site = f"rank {self.rank} of {self.size}: {verb}: "
        text = str(error).removeprefix(site)
        backend = self._carrier.backend
        if backend.failure is not None:
            raise error  # as of a signal's handler, which has ended the group's call
        if is_collective and can_tell and backend.shares_memory:
            self._door.refuse(f"{verb}: {text}")
        elif is_collective and self.size > 1:
            self._untold = f"{verb}: {text}"
            self._quick = None
        if type(error) in (TypeError, ValueError) and not str(error).startswith("rank "):
            raise type(error)(f"{site}{text}") from error
        raise error

    def _peer(self, name: str, rank: int) -> int:
        """A rank of the group. Raises TypeError or ValueError if it is none."""
        if isinstance(rank, bool) or not hasattr(rank, "__index__"):
            raise TypeError(f"{name}: expected a rank, got {rank!r}")
        found = rank.__index__()
        if not 0 <= found < self.size:
            raise ValueError(f"{name}: expected a rank from 0 to {self.size - 1}, got {found}")
        return found

    def _tree(
        self, verb: str, tree: Any, op: Operation | None, src: int, out: Any, async_op: bool
    ) -> Any:
        """All-reduces or broadcasts a tree of arrays."""

        def plan() -> Planned:
            number = None if op is None else number_of(op)
            is_quick = not async_op and not self._pending
            call = tree_call(
                self._carrier, tree, out, number, self._peer("src", src), is_quick=is_quick
            )
            return Planned(call.issue, call.finish, call.reads, call.writes, call.prepare)

        return self._run(verb, tree, plan, async_op)


def nothing() -> None:
    """The result of a call that gives none."""
    return None
