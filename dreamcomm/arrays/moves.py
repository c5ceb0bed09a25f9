"""Collectives that move arrays of any framework."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import torch

from dreamcomm.arrays.caller import Caller, Planned, collective
from dreamcomm.arrays.calls import Call
from dreamcomm.arrays.handles import Handle
from dreamcomm.arrays.operations import Kind
from dreamcomm.arrays.shapes import gathered, row_bytes, scattered, split_sizes
from dreamcomm.arrays.targets import target_of
from dreamcomm.arrays.trees.layout import is_tree
from dreamcomm.arrays.views import view_of

__all__ = ["Moves"]

A = TypeVar("A")
OF_ROWS = zlib.crc32(b"all_gather_v")  # it meets no other verb


class Moves(Caller):
    """The collectives that move arrays; see :class:`Collectives`."""

    @overload
    def broadcast(
        self, array: A, src: int = 0, *, out: Any = None, async_op: Literal[False] = False
    ) -> A: ...
    @overload
    def broadcast(
        self, array: A, src: int = 0, *, out: Any = None, async_op: Literal[True]
    ) -> Handle[A]: ...
    def broadcast(
        self, array: Any, src: int = 0, *, out: Any = None, async_op: bool = False
    ) -> Any:
        """Gives the array of rank ``src`` to all ranks.

        Args:
            array: of any shape, or a tree as in :meth:`all_reduce`. On other ranks it says the
                shape, dtype and kind; its elements do not count.
            src: the rank that sends.
            out, async_op: as in :meth:`all_reduce`.
        """
        if is_tree(array):
            return self._tree("broadcast", array, None, src, out, async_op)

        def plan() -> Planned:
            root = self._peer("src", src)
            given = view_of(array, "array")
            target = target_of(given, array, out, tuple(given.tensor.shape))
            sent = given.tensor if self.rank == root else None
            call = Call(Kind.BROADCAST, sent, target.tensor, root=root)
            return collective(self._carrier, call, given, target)

        return self._run("broadcast", array, plan, async_op)

    @overload
    def all_gather(self, array: A, *, out: Any = None, async_op: Literal[False] = False) -> A: ...
    @overload
    def all_gather(self, array: A, *, out: Any = None, async_op: Literal[True]) -> Handle[A]: ...
    def all_gather(self, array: Any, *, out: Any = None, async_op: bool = False) -> Any:
        """Gives the arrays of all ranks, one after the other, to every rank.

        Args:
            array: of shape ``(n, ...)``, or one number of shape ``()``.
            out: of shape ``(size * n, ...)``, as a new array has it, or ``(size, n, ...)``.
            async_op: return a :class:`Handle`.
        """

        def plan() -> Planned:
            given = view_of(array, "array")
            target = target_of(given, array, out, *gathered(given.tensor.shape, self.size))
            sizes = [given.tensor.nbytes] * self.size
            call = Call(Kind.ALL_GATHER, given.tensor, target.tensor, out_sizes=sizes)
            return collective(self._carrier, call, given, target)

        return self._run("all_gather", array, plan, async_op)

    @overload
    def all_gather_v(
        self,
        array: A,
        sizes: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: Literal[False] = False,
    ) -> A: ...
    @overload
    def all_gather_v(
        self,
        array: A,
        sizes: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: Literal[True],
    ) -> Handle[A]: ...
    def all_gather_v(
        self,
        array: Any,
        sizes: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Gives the arrays of all ranks to every rank, where their numbers of rows differ.

        Args:
            array: of shape ``(n, ...)``; n is the rank's own.
            sizes: n of each rank. None: the ranks exchange them first, in a call of their own.
            out: of shape ``(sum of sizes, ...)``.
            async_op: return a :class:`Handle`.
        """
        rows = sizes
        if rows is None:
            rows = self._rows_of_all(array)

        def plan() -> Planned:
            given = view_of(array, "array")
            tensor = given.tensor
            if tensor.dim() == 0:
                raise ValueError("array: expected one with rows, got one number")
            counts = split_sizes("sizes", None, rows, self.size)
            if counts[self.rank] != tensor.shape[0]:
                raise ValueError(
                    f"sizes: this rank has {tensor.shape[0]} rows, got {counts[self.rank]}"
                )
            target = target_of(given, array, out, (sum(counts), *tensor.shape[1:]))
            row = row_bytes(tensor.shape, tensor.element_size())
            call = Call(
                Kind.ALL_TO_ALL, tensor, target.tensor,
                out_sizes=[count * row for count in counts], copies=self.size, digest=OF_ROWS,
            )  # fmt: skip
            return collective(self._carrier, call, given, target)

        return self._run("all_gather_v", array, plan, async_op)

    @overload
    def gather(
        self, array: A, dst: int = 0, *, out: Any = None, async_op: Literal[False] = False
    ) -> A | None: ...
    @overload
    def gather(
        self, array: A, dst: int = 0, *, out: Any = None, async_op: Literal[True]
    ) -> Handle[A | None]: ...
    def gather(self, array: Any, dst: int = 0, *, out: Any = None, async_op: bool = False) -> Any:
        """Gives the arrays of all ranks to rank ``dst``; the others get None.

        Args:
            array, async_op: as in :meth:`all_gather`.
            dst: the rank that receives.
            out: on ``dst`` as in :meth:`all_gather`; not used on other ranks.
        """

        def plan() -> Planned:
            root = self._peer("dst", dst)
            given = view_of(array, "array")
            if self.rank != root:
                call = Call(Kind.GATHER, given.tensor, None, root=root)
                return collective(self._carrier, call, given, None)
            target = target_of(given, array, out, *gathered(given.tensor.shape, self.size))
            sizes = [given.tensor.nbytes] * self.size
            call = Call(Kind.GATHER, given.tensor, target.tensor, root=root, out_sizes=sizes)
            return collective(self._carrier, call, given, target)

        return self._run("gather", array, plan, async_op)

    @overload
    def scatter(
        self, array: A, src: int = 0, *, out: Any = None, async_op: Literal[False] = False
    ) -> A: ...
    @overload
    def scatter(
        self, array: A, src: int = 0, *, out: Any = None, async_op: Literal[True]
    ) -> Handle[A]: ...
    def scatter(self, array: Any, src: int = 0, *, out: Any = None, async_op: bool = False) -> Any:
        """Divides the array of rank ``src`` among the ranks, by its first dimension.

        Args:
            array: of shape ``(size * n, ...)``. On other ranks its elements do not count, and with
                ``out`` it may be None.
            src: the rank that sends.
            out: of shape ``(n, ...)``, as a new array has it; for n = 1 also ``(...)``.
            async_op: return a :class:`Handle`.
        """

        def plan() -> Planned:
            root = self._peer("src", src)
            if array is None and out is not None and self.rank != root:
                given = view_of(out, "out")
                shapes: tuple[tuple[int, ...], ...] = (tuple(given.tensor.shape),)
                target = target_of(given, out, out, *shapes)
            else:
                given = view_of(array, "array")
                target = target_of(given, array, out, *scattered(given.tensor.shape, self.size))
            if self.rank != root:
                call = Call(Kind.SCATTER, None, target.tensor, root=root)
                return collective(self._carrier, call, given, target)
            sizes = [given.tensor.nbytes // self.size] * self.size
            call = Call(Kind.SCATTER, given.tensor, target.tensor, root=root, in_sizes=sizes)
            return collective(self._carrier, call, given, target)

        return self._run("scatter", array, plan, async_op)

    @overload
    def all_to_all(
        self,
        array: A,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: Literal[False] = False,
    ) -> A: ...
    @overload
    def all_to_all(
        self,
        array: A,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: Literal[True],
    ) -> Handle[A]: ...
    def all_to_all(
        self,
        array: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Sends a part of the array to each rank, and receives one from each.

        Args:
            array: of shape ``(rows, ...)``; its parts are for ranks 0, 1, ... in turn.
            output_split_sizes: rows that each rank sends to this one; None: as many as this one
                sends to it.
            input_split_sizes: rows for each rank; None: equal parts.
            out: of shape ``(sum of output_split_sizes, ...)``.
            async_op: return a :class:`Handle`.
        """

        def plan() -> Planned:
            given = view_of(array, "array")
            tensor = given.tensor
            if tensor.dim() == 0:
                raise ValueError("array: expected one with rows, got one number")
            rows = tensor.shape[0]
            sent = split_sizes("input_split_sizes", rows, input_split_sizes, self.size)
            got = sent if output_split_sizes is None else output_split_sizes
            got = split_sizes("output_split_sizes", None, got, self.size)
            target = target_of(given, array, out, (sum(got), *tensor.shape[1:]))
            row = row_bytes(tensor.shape, tensor.element_size())
            call = Call(
                Kind.ALL_TO_ALL, tensor, target.tensor,
                in_sizes=[n * row for n in sent], out_sizes=[n * row for n in got],
            )  # fmt: skip
            return collective(self._carrier, call, given, target)

        return self._run("all_to_all", array, plan, async_op)

    def _rows_of_all(self, array: Any) -> list[int]:
        """The number of rows of every rank's array."""

        def plan() -> Planned:
            shape = view_of(array, "array").tensor.shape
            rows = torch.tensor([shape[0] if shape else 0], device="cpu")
            found = torch.empty(self.size, dtype=torch.int64, device="cpu")
            sizes = [rows.nbytes] * self.size
            call = Call(Kind.ALL_GATHER, rows, found, out_sizes=sizes, digest=OF_ROWS)
            return Planned(lambda later: self._carrier.issue(call, later), found.tolist)

        rows: list[int] = self._run("all_gather_v", array, plan, False)
        return rows
