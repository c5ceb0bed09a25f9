"""Calls under way, and the memory that they read and write."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from dreamcomm.arrays.calls import Issued
from dreamcomm.arrays.views import View, extent

__all__ = ["Handle", "PendingCalls"]

R = TypeVar("R")


class Handle(Generic[R]):
    """A call under way. Its arrays live until it has ended, also if the caller drops them.

    Until :meth:`wait` has returned, the arrays that the call writes must not be used, and those
    that it reads must not be changed. The communicator refuses calls that would.
    """

    def __init__(self, issued: Issued, finish: Callable[[], R]) -> None:
        self._issued: Issued | None = issued  # until it has succeeded
        self._finish = finish
        self._source: Callable[[], int] | None = None
        self._result: R | None = None
        self.is_waited_for = False  # with or without an error

    def wait(self) -> R:
        """Waits for the call's end; returns what the call without ``async_op`` returns.

        Raises:
            DistBackendError: the call failed.
        """
        if self._issued is not None:
            self.is_waited_for = True
            self._issued.wait()
            if self._issued.after is not None:
                self._issued.after()
            self._result = self._finish()
            self._issued = None
        return cast(R, self._result)

    def is_completed(self) -> bool:
        """Whether the call has ended, so that :meth:`wait` returns at once."""
        return self._issued is None or self._issued.is_completed()

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
    """The calls of a communicator that nobody has waited for.

    INVARIANT: whether a call is pending depends on the program alone, and not on how fast the call
    is, as long as its handle lives. So all ranks of a correct program refuse the same calls.
    """

    def __init__(self) -> None:
        self.calls: list[_Pending] = []  # one list for good: compiled code looks at it

    def __bool__(self) -> bool:
        if self.calls:
            self.calls[:] = [one for one in self.calls if one.is_pending()]
        return bool(self.calls)

    def add(
        self,
        verb: str,
        handle: Handle[Any],
        issued: Issued,
        reads: Sequence[View],
        writes: Sequence[View],
    ) -> None:
        """Adds a call that has begun."""
        self.calls.append(_Pending(verb, handle, issued, reads, writes))

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

    def wait(self) -> None:
        """Waits until all have ended, with or without an error, and forgets them."""
        calls = self.calls.copy()
        self.calls.clear()
        for one in calls:
            one.end()


class _Pending:
    def __init__(
        self,
        verb: str,
        handle: Handle[Any],
        issued: Issued,
        reads: Sequence[View],
        writes: Sequence[View],
    ) -> None:
        self.verb = verb
        self.reads = [extent(view) for view in reads]
        self.writes = [extent(view) for view in writes]
        self._views = [*reads, *writes]  # keep the memory
        self._handle, self._issued = weakref.ref(handle), issued

    def is_pending(self) -> bool:
        handle = self._handle()
        return not (self._issued.is_completed() if handle is None else handle.is_waited_for)

    def end(self) -> None:
        with suppress(RuntimeError):  # the handle's own wait() raises it
            self._issued.wait()
