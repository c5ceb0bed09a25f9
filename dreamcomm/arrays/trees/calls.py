"""Trees of arrays in one call: all arrays of a dtype in one buffer of the shared heap."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dreamcomm.arrays.calls import Call, Carrier, Issued
from dreamcomm.arrays.extents import extent
from dreamcomm.arrays.operations import NO_OPERATION, Kind
from dreamcomm.arrays.targets import Target, target_of
from dreamcomm.arrays.trees.layout import digest_of, outs_of, paths_of
from dreamcomm.arrays.trees.plain import NumpyTreeCall, are_plain
from dreamcomm.arrays.views import View, pieces, view_of
from dreamcomm.memory import empty

__all__ = ["TreeCall", "tree_call"]


class TreeCall(Protocol):
    """An all_reduce, or without an operation a broadcast, of a tree's arrays.

    INVARIANT: arrays lie in the buffers in the order of their paths, and a digest of all paths,
    shapes and dtypes is compared by the ranks before data moves. So the order in which a dict was
    filled does not count, and trees that differ never meet.
    """

    reads: list[tuple[str, View]]
    writes: list[View]

    def prepare(self) -> None:
        """Copies the arrays together."""

    def issue(self, asynchronous: bool) -> Issued:
        """Begins the call."""

    def finish(self) -> Any:
        """Copies the results apart; returns their tree."""


def tree_call(
    carrier: Carrier, tree: Any, out: Any, operation: int | None, root: int, *, is_quick: bool
) -> TreeCall:
    """Makes the call of a tree.

    Args:
        carrier: of the group.
        tree, out: as the caller gave them.
        operation: its number; None for a broadcast.
        root: of a broadcast.
        is_quick: the call ends before its caller goes on, and no other call is under way.

    Raises:
        TypeError, ValueError: the trees or their arrays cannot be used.
    """
    number = NO_OPERATION if operation is None else operation
    leaves, spec = pytree.tree_flatten(tree)
    outs = leaves if out is tree else outs_of(spec, leaves, out)
    if is_quick and carrier.backend.shares_memory and are_plain(leaves, outs):
        return NumpyTreeCall(carrier, leaves, outs, spec, out, number, root)
    return _AnyTreeCall(carrier, leaves, outs, spec, out, number, root)


class _Leaf(NamedTuple):
    """An array of a tree, and where its result goes."""

    path: str
    given: View
    target: Target

    @property
    def tensor(self) -> Tensor:
        return self.given.tensor


class _AnyTreeCall:
    """A call on arrays of any kind, also of several."""

    def __init__(
        self,
        carrier: Carrier,
        leaves: list[Any],
        outs: list[Any],
        spec: pytree.TreeSpec,
        out: Any,
        operation: int,
        root: int,
    ) -> None:
        self._carrier, self._operation, self._root, self._spec = carrier, operation, root, spec
        self._out = out
        self._leaves: list[_Leaf | None] = [None] * len(leaves)
        groups: dict[str, list[_Leaf]] = {}
        paths, order = paths_of(spec)
        for number in order:
            if leaves[number] is None and outs[number] is None:
                continue
            leaf = _planned(paths[number], leaves[number], outs[number])
            self._leaves[number] = leaf
            groups.setdefault(_name(leaf.tensor), []).append(leaf)
        self._groups = [groups[name] for name in sorted(groups)]
        found = [leaf for leaf in self._leaves if leaf is not None]
        self._check_devices(found)
        self._in_core = carrier.in_core(found[0].tensor)
        self._digest = digest_of(
            spec,
            tuple(None if one is None else tuple(one.tensor.shape) for one in self._leaves),
            tuple(None if one is None else _name(one.tensor) for one in self._leaves),
        )
        self._buffers: list[Tensor] = []
        self.reads = [(f"array{one.path}", one.given) for one in found]
        self.writes = [one.target.view for one in found if one.target.view is not None]
        _check_apart(found)

    def prepare(self) -> None:
        sends = self._operation >= 0 or self._carrier.backend.rank() == self._root
        for leaves in self._groups:
            some = leaves[0].tensor
            count = sum(one.tensor.numel() for one in leaves)
            buffer = empty(count, dtype=some.dtype) if self._in_core else some.new_empty(count)
            if sends:
                tensors = [one.tensor for one in leaves]
                torch._foreach_copy_(_shaped(buffer, tensors), tensors)
            self._buffers.append(buffer)

    def issue(self, asynchronous: bool) -> Issued:
        if not self._in_core:
            return self._issue_apart(asynchronous)
        work: Any = self._carrier.door.run_together(
            self._buffers, self._operation, self._root, self._digest, asynchronous
        )
        return Issued(work.wait, work.is_completed)

    def _issue_apart(self, asynchronous: bool) -> Issued:
        """One call for each dtype, where torch's backends or a device's carry them."""
        kind = Kind.ALL_REDUCE if self._operation >= 0 else Kind.BROADCAST
        calls = [
            self._carrier.issue(Call(kind, one, one, self._operation, self._root), asynchronous)
            for one in self._buffers
        ]
        return Issued(
            lambda: [one.wait() for one in calls],
            lambda: all(one.is_completed() for one in calls),
        )

    def finish(self) -> Any:
        for leaves, buffer in zip(self._groups, self._buffers, strict=True):
            outs = [one.target.tensor for one in leaves]
            torch._foreach_copy_(outs, _shaped(buffer, outs))
        results = [None if one is None else one.target.finish() for one in self._leaves]
        made = pytree.tree_unflatten(results, self._spec)
        return made if self._out is None else self._out

    def _check_devices(self, leaves: list[_Leaf]) -> None:
        if not leaves:
            raise ValueError("array: the tree holds no array")
        paths = {one.tensor.device: one.path for one in leaves}
        if len(paths) > 1:
            told = " and ".join(f"array{path} on {device}" for device, path in paths.items())
            raise ValueError(f"array: the tree's arrays are on several devices: {told}")


def _planned(path: str, given: Any, out: Any) -> _Leaf:
    view = view_of(given, f"array{path}")
    try:
        return _Leaf(path, view, target_of(view, given, out, tuple(view.tensor.shape)))
    except (TypeError, ValueError) as error:
        raise type(error)(f"out{path}{str(error).removeprefix('out')}") from error


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shaped(buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The parts of a buffer that have the shapes of those tensors, one after the other."""
    parts = pieces(buffer, [one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def _check_apart(leaves: list[_Leaf]) -> None:
    """Raises ValueError if two arrays of ``out`` share memory, and their results may differ."""
    found = sorted(
        (*extent(one.target.view)[1:], one.path, one.target.view is one.given)
        for one in leaves
        if one.target.view is not None
    )
    for (begin, end, path, in_place), (first, last, other, too) in itertools.pairwise(found):
        is_one = in_place and too and (begin, end) == (first, last)  # tied arrays, in place
        if first < end and first < last and not is_one:
            raise ValueError(f"out{other}: it and out{path} lie in each other's memory")
