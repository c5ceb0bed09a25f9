"""Collectives on arrays of any framework."""

from __future__ import annotations

from typing import Any, Literal, overload

from dreamcomm.arrays.caller import Planned, nothing
from dreamcomm.arrays.handles import Handle
from dreamcomm.arrays.moves import Moves
from dreamcomm.arrays.reductions import Reductions

__all__ = ["Collectives"]


class Collectives(Reductions, Moves):
    """The calls that all ranks of a group make together, in one order.

    One rule holds for all of them. A call returns a new array of the kind that it was given. With
    ``out=`` the result goes into that array, which is returned; ``out=array`` works in place,
    without a copy. With ``async_op=True`` a call returns a :class:`Handle` at once.

    Arrays are NumPy's, torch's tensors, buffers (``memoryview``, ``array.array``), and whatever
    speaks DLPack. All ranks give arrays of one dtype; where a verb does not say otherwise also of
    one shape. Numbers of elements are compared; shapes in trees alone. Kinds and strides may
    differ.

    Each raises:
        TypeError, ValueError: this rank's arguments are no such arrays. Nothing is sent, the call
            fails on all ranks, and the next one works. For arrays on an accelerator, or where the
            ranks share no memory and torch's Gloo carries the calls, others are not told.
        DistBackendError: the ranks' calls differ, or a rank was lost. The text says which.
        RuntimeError: this rank has refused a call before that the others were not told of.
    """

    @overload
    def barrier(self, *, async_op: Literal[False] = False) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True]) -> Handle[None]: ...
    def barrier(self, *, async_op: bool = False) -> Any:
        """Returns when all ranks have called it, and the calls before it have ended."""

        def plan() -> Planned:
            return Planned(self._carrier.issue_barrier, nothing)

        return self._run("barrier", None, plan, async_op)
