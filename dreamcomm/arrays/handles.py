"""Calls under way, and the memory that they read and write."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from dreamcomm.arrays.calls import Issued
from dreamcomm.arrays.extents import extent
from dreamcomm.arrays.views import View

__all__ = ["Handle", "PendingCalls", "Running"]

R = TypeVar("R")


class Running(Generic[R]):
    """A call that has begun, until its result is there.

    Args:
        issued: the call.
        finish: called once after it; returns the result.
    """

    def __init__(self, issued: Issued, finish: Callable[[], R]) -> None:
        self._issued: Issued | None = issued  # until it has succeeded
        self._finish: Callable[[], R] | None = finish
        self._result: R | None = None
        self.is_over = False  # with or without an error

    def end(self) -> R:
        """Waits for the end; returns the result, or raises the call's error, also again."""
        if self._issued is not None:
            try:
                self._issued.wait()
            except Exception:  # not Ctrl-C: then the call goes on
                self.is_over = True
                raise
            if self._issued.after is not None:
                self._issued.after()
            if self._finish is not None:
                self._result = self._finish()
            self.is_over = True
            self._issued = self._finish = None  # frees the arrays
        return cast(R, self._result)

    def is_completed(self) -> bool:
        """Whether :meth:`end` returns at once."""
        return self._issued is None or self._issued.is_completed()


class Handle(Generic[R]):
    """A call under way. Its arrays live until it has ended, also if the caller drops them.

    Until :meth:`wait` has returned, the arrays that the call writes must not be used, and those
    that it reads must not be changed. The communicator refuses calls that would.
    """

    def __init__(self, running: Running[R], pending: PendingCalls) -> None:
        self._running, self._pending = running, pending
        self._source: Callable[[], int] | None = None

    def wait(self) -> R:
        """Waits for the call's end; returns what the call without ``async_op`` returns.

        Raises:
            DistBackendError: the call failed.
        """
        try:
            return self._running.end()
        finally:
            if self._running.is_over:
                self._pending.forget(self._running)

    def is_completed(self) -> bool:
        """Whether the call has ended, so that :meth:`wait` returns at once."""
        return self._running.is_completed()

    def tells_source(self, source: Callable[[], int]) -> None:
        """Sets how :meth:`source` learns the rank, after the end."""
        self._source = source

    def source(self) -> int:
        """Waits; the rank that has sent what a receive got. Raises ValueError for other calls."""
        if self._source is None:
            raise ValueError("only a receive has a source")
        self.wait()
        return self._source()


class PendingCalls:
    """The pending calls of a communicator and of its parts: those without a wait so far.

    INVARIANT: whether a call is pending depends on the program alone, and not on how fast the call
    is, as long as its handle lives. So all ranks of a correct program refuse the same calls.
    """

    def __init__(self) -> None:
        self.calls: list[_Pending] = []  # one list for good: compiled code looks at it

    def __bool__(self) -> bool:
        for one in self.calls.copy():
            if one.is_dropped() and one.running.is_completed():
                one.end()
                self.forget(one.running)
        return bool(self.calls)

    def add(
        self,
        owner: object,
        verb: str,
        running: Running[R],
        reads: Sequence[View],
        writes: Sequence[View],
    ) -> Handle[R]:
        """Adds a call that ``owner`` has begun; returns its handle."""
        handle = Handle(running, self)
        self.calls.append(_Pending(owner, verb, running, handle, reads, writes))
        return handle

    def forget(self, running: Running[Any]) -> None:
        """Removes a call that is over."""
        self.calls[:] = [one for one in self.calls if one.running is not running]

    def check(self, reads: Sequence[tuple[str, View]], writes: Sequence[View]) -> None:
        """Raises ValueError if a pending call writes what is read, or uses what is written."""
        if not self:
            return
        outs = [("out", extent(view)) for view in writes]
        all_of = [*((name, extent(view)) for name, view in reads), *outs]
        for one in self.calls:
            for name, where in all_of:
                if any(where.meets(other) for other in one.writes):
                    raise ValueError(
                        f"{name}: a pending {one.verb} writes it: wait for its handle first"
                    )
            for name, where in outs:
                if any(where.meets(other) for other in one.reads):
                    raise ValueError(
                        f"{name}: a pending {one.verb} reads it: wait for its handle first"
                    )

    def wait(self, owner: object) -> None:
        """Waits until the owner's calls have ended, with or without an error; forgets them."""
        for one in self.calls.copy():
            if one.owner is owner:
                one.end()
                self.forget(one.running)

    def count(self, owner: object) -> int:
        """The number of the owner's calls."""
        return sum(one.owner is owner for one in self.calls)


class _Pending:
    def __init__(
        self,
        owner: object,
        verb: str,
        running: Running[Any],
        handle: Handle[Any],
        reads: Sequence[View],
        writes: Sequence[View],
    ) -> None:
        self.owner, self.verb, self.running = owner, verb, running
        self.reads = [extent(view) for view in reads]
        self.writes = [extent(view) for view in writes]
        self._handle = weakref.ref(handle)

    def is_dropped(self) -> bool:
        """Whether its handle is gone."""
        return self._handle() is None

    def end(self) -> None:
        """Ends it, also with an error, which its handle's wait() raises."""
        with suppress(Exception):
            self.running.end()
