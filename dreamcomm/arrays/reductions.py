"""Reductions of arrays of any framework."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from dreamcomm._torch.build_check import check_build
from dreamcomm.arrays.caller import Caller, Planned, collective
from dreamcomm.arrays.calls import Call
from dreamcomm.arrays.handles import Handle
from dreamcomm.arrays.operations import Kind, Operation, number_of
from dreamcomm.arrays.shapes import scattered
from dreamcomm.arrays.targets import target_of
from dreamcomm.arrays.trees.layout import is_tree
from dreamcomm.arrays.views import view_of

__all__ = ["Reductions"]

A = TypeVar("A")


class Reductions(Caller):
    """The collectives that compute; see :class:`Collectives`."""

    @overload
    def all_reduce(
        self, array: A, op: Operation = "sum", *, out: Any = None, async_op: Literal[False] = False
    ) -> A: ...
    @overload
    def all_reduce(
        self, array: A, op: Operation = "sum", *, out: Any = None, async_op: Literal[True]
    ) -> Handle[A]: ...
    def all_reduce(
        self, array: Any, op: Operation = "sum", *, out: Any = None, async_op: bool = False
    ) -> Any:
        """Reduces the arrays of all ranks; every rank gets the result.

        The operations are in the order of the ranks, so that the result has the same bits each
        time.

        Args:
            array: of any shape; or a tree of arrays: lists, tuples and dicts in each other. The
                arrays of a tree are reduced in one call for each dtype. A None in it stays None.
            op: "sum", "avg", "product", "min", "max", "band", "bor", "bxor", or torch's ReduceOp.
            out: an array of the same shape and dtype, or a tree of them.
            async_op: return a :class:`Handle`.
        """
        return self._all_reduce(array, op, out=out, async_op=async_op)

    def _all_reduce(
        self, array: Any, op: Operation = "sum", *, out: Any = None, async_op: bool = False
    ) -> Any:
        """An all_reduce that the compiled method does not serve itself."""
        if is_tree(array):
            return self._tree("all_reduce", array, op, 0, out, async_op)

        def plan() -> Planned:
            given = view_of(array, "array")
            target = target_of(given, array, out, tuple(given.tensor.shape))
            call = Call(Kind.ALL_REDUCE, given.tensor, target.tensor, number_of(op))
            return collective(self._carrier, call, given, target)

        return self._run("all_reduce", array, plan, async_op)

    @overload
    def average(self, array: A, *, out: Any = None, async_op: Literal[False] = False) -> A: ...
    @overload
    def average(self, array: A, *, out: Any = None, async_op: Literal[True]) -> Handle[A]: ...
    def average(self, array: Any, *, out: Any = None, async_op: bool = False) -> Any:
        """Averages gradients, or any array or tree of arrays: ``all_reduce`` with "avg"."""
        if async_op:
            return self.all_reduce(array, "avg", out=out, async_op=True)
        return self.all_reduce(array, "avg", out=out)

    @overload
    def reduce(
        self,
        array: A,
        dst: int = 0,
        op: Operation = "sum",
        *,
        out: Any = None,
        async_op: Literal[False] = False,
    ) -> A | None: ...
    @overload
    def reduce(
        self,
        array: A,
        dst: int = 0,
        op: Operation = "sum",
        *,
        out: Any = None,
        async_op: Literal[True],
    ) -> Handle[A | None]: ...
    def reduce(
        self,
        array: Any,
        dst: int = 0,
        op: Operation = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces the arrays of all ranks; rank ``dst`` gets the result, the others None.

        Args:
            array, op, async_op: as in :meth:`all_reduce`, without trees.
            dst: the rank that receives.
            out: on ``dst`` as in :meth:`all_reduce`. On other ranks it stays as it is.
        """

        def plan() -> Planned:
            root = self._peer("dst", dst)
            given = view_of(array, "array")
            number = number_of(op)
            if self.rank != root:
                call = Call(Kind.REDUCE, given.tensor, None, number, root)
                return collective(self._carrier, call, given, None)
            target = target_of(given, array, out, tuple(given.tensor.shape))
            call = Call(Kind.REDUCE, given.tensor, target.tensor, number, root)
            return collective(self._carrier, call, given, target)

        return self._run("reduce", array, plan, async_op)

    @overload
    def reduce_scatter(
        self, array: A, op: Operation = "sum", *, out: Any = None, async_op: Literal[False] = False
    ) -> A: ...
    @overload
    def reduce_scatter(
        self, array: A, op: Operation = "sum", *, out: Any = None, async_op: Literal[True]
    ) -> Handle[A]: ...
    def reduce_scatter(
        self, array: Any, op: Operation = "sum", *, out: Any = None, async_op: bool = False
    ) -> Any:
        """Reduces the arrays of all ranks, and divides the result by its first dimension.

        Args:
            array: of shape ``(size * n, ...)``.
            op, async_op: as in :meth:`all_reduce`.
            out: as in :meth:`scatter`.
        """

        def plan() -> Planned:
            given = view_of(array, "array")
            target = target_of(given, array, out, *scattered(given.tensor.shape, self.size))
            sizes = [given.tensor.nbytes // self.size] * self.size
            call = Call(
                Kind.REDUCE_SCATTER, given.tensor, target.tensor, number_of(op), in_sizes=sizes
            )
            return collective(self._carrier, call, given, target)

        return self._run("reduce_scatter", array, plan, async_op)


if not TYPE_CHECKING:  # the method above says the types, and the text
    check_build()
    from dreamcomm import _C

    Reductions.all_reduce = _C.quick_all_reduce(
        Reductions,
        "all_reduce($self, array, op='sum', *, out=None, async_op=False)\n--\n\n"
        + inspect.getdoc(Reductions.all_reduce),
    )
