"""Messages of arrays between two ranks."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from dreamcomm.arrays.caller import Caller, Planned, nothing
from dreamcomm.arrays.calls import Issued
from dreamcomm.arrays.handles import Handle
from dreamcomm.arrays.targets import target_of
from dreamcomm.arrays.views import view_of
from dreamcomm.ranks.tags import USERS

__all__ = ["Messages", "checked_tag"]

A = TypeVar("A")


class Messages(Caller):
    """Sends and receives. They need no order with collectives.

    A message is matched by its sender, receiver and tag, in the order in which it was sent.

    Each raises:
        TypeError, ValueError: this rank's arguments cannot be sent or received. The other rank is
            not told: its call ends at the group's timeout.
        DistBackendError: the message failed: it had another size, or a rank was lost.
    """

    @overload
    def send(
        self, array: Any, dst: int, tag: int = 0, *, async_op: Literal[False] = False
    ) -> None: ...
    @overload
    def send(
        self, array: Any, dst: int, tag: int = 0, *, async_op: Literal[True]
    ) -> Handle[None]: ...
    def send(self, array: Any, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Sends an array to rank ``dst``. Returns when the array may be changed.

        Args:
            array: of any kind, as of :class:`Collectives`.
            dst: the rank that receives.
            tag: a number from 0 to 1048575, equal on both sides.
            async_op: return a :class:`Handle` at once.
        """

        def plan() -> Planned:
            given = view_of(array, "array")
            tensor = given.tensor.contiguous()
            peer, number = self._other("dst", dst), checked_tag(tag)
            backend = self._carrier.backend_for(tensor)

            def issue(later: bool) -> Issued:
                return _waited(backend.send([tensor], peer, number), later)

            return Planned(issue, nothing, [("array", given)])

        return self._run("send", array, plan, async_op, is_collective=False)

    @overload
    def recv(
        self,
        array: A,
        src: int | None = None,
        tag: int = 0,
        *,
        out: Any = None,
        async_op: Literal[False] = False,
    ) -> A: ...
    @overload
    def recv(
        self,
        array: A,
        src: int | None = None,
        tag: int = 0,
        *,
        out: Any = None,
        async_op: Literal[True],
    ) -> Handle[A]: ...
    def recv(
        self,
        array: Any,
        src: int | None = None,
        tag: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Receives an array.

        Args:
            array: says the shape, dtype and kind. Its elements do not count.
            src: the rank that sends; None: any rank. The handle of an ``async_op`` tells which it
                was.
            tag: as of :meth:`send`.
            out: receives the elements; ``out=array`` receives in place.
            async_op: return a :class:`Handle` at once.
        """
        works: list[Any] = []

        def plan() -> Planned:
            given = view_of(array, "array")
            target = target_of(given, array, out, tuple(given.tensor.shape))
            memory = target.tensor.contiguous()
            peer, number = None if src is None else self._other("src", src), checked_tag(tag)
            backend = self._carrier.backend_for(memory)

            def issue(later: bool) -> Issued:
                if peer is None:
                    works.append(backend.recv_anysource([memory], number))
                else:
                    works.append(backend.recv([memory], peer, number))
                return _waited(works[0], later)

            def finish() -> Any:
                if memory is not target.tensor:
                    target.tensor.copy_(memory)
                return target.finish()

            return Planned(issue, finish, (), () if target.view is None else (target.view,))

        result = self._run("recv", array, plan, async_op, is_collective=False)
        if isinstance(result, Handle):
            result.tells_source(lambda: works[0]._source_rank() if src is None else src)
        return result

    def _other(self, name: str, rank: int) -> int:
        """Another rank of the group."""
        found = self._peer(name, rank)
        if found == self.rank:
            raise ValueError(f"{name}: expected another rank than this one, got {found}")
        return found


def checked_tag(tag: int) -> int:
    """A tag of a user. Raises ValueError if it is none."""
    found = -1 if isinstance(tag, bool) or not hasattr(tag, "__index__") else tag.__index__()
    if not 0 <= found < USERS:
        raise ValueError(f"tag: expected a number from 0 to {USERS - 1}, got {tag!r}")
    return found


def _waited(work: Any, later: bool) -> Issued:
    if not later:
        work.wait()
    return Issued(work.wait, work.is_completed)
