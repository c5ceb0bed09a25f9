"""Trees of arrays in one call: all arrays of a dtype in one buffer of the shared heap."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dreamcomm.arrays.calls import Call, Carrier, Issued
from dreamcomm.arrays.operations import NO_OPERATION, Kind
from dreamcomm.arrays.targets import Target, target_of
from dreamcomm.arrays.views import pieces, view_of
from dreamcomm.memory import empty

__all__ = ["TreeCall", "is_tree"]


def is_tree(given: Any) -> bool:
    """Whether it is a container that torch's pytree knows, and no array."""
    return isinstance(given, (list, tuple, dict)) or not pytree.tree_is_leaf(given)


class _Leaf(NamedTuple):
    """An array of a tree, and where its result goes."""

    path: str
    tensor: Tensor
    target: Target


class TreeCall:
    """An all_reduce, or without an operation a broadcast, of a tree's arrays.

    INVARIANT: arrays lie in the buffers in the order of their paths, and a digest of all paths,
    shapes and dtypes is compared by the ranks before data moves. So the order in which a dict was
    filled does not count, and trees that differ never meet.

    Raises:
        TypeError, ValueError: the trees or their arrays cannot be used.
    """

    def __init__(
        self, carrier: Carrier, tree: Any, out: Any, operation: int | None, root: int
    ) -> None:
        self._carrier, self._root = carrier, root
        self._operation = NO_OPERATION if operation is None else operation
        leaves, self._spec = pytree.tree_flatten(tree)
        paths, order = _paths(self._spec)
        outs = leaves if out is tree else _outs(paths, out)
        self._leaves: list[_Leaf | None] = [None] * len(leaves)
        groups: dict[torch.dtype, list[_Leaf]] = {}
        for number in order:
            if leaves[number] is None and outs[number] is None:
                continue
            leaf = _planned(paths[number], leaves[number], outs[number])
            self._leaves[number] = leaf
            groups.setdefault(leaf.tensor.dtype, []).append(leaf)
        self._groups = [groups[dtype] for dtype in sorted(groups, key=str)]
        found = [leaf for group in self._groups for leaf in group]
        self._check_devices(found)
        self._in_core = carrier.in_core(found[0].tensor)
        self._digest = zlib.crc32(
            repr([(one.path, one.tensor.shape, one.tensor.dtype) for one in found]).encode()
        )
        self._buffers: list[Tensor] = []
        self.reads = [(f"array{one.path}", one.tensor) for one in found]
        self.writes = [one.target.tensor for one in found if not one.target.is_new]

    def prepare(self) -> None:
        """Copies the arrays together."""
        sends = self._operation >= 0 or self._carrier.backend.rank() == self._root
        for leaves in self._groups:
            some = leaves[0].tensor
            count = sum(one.tensor.numel() for one in leaves)
            if self._in_core:
                buffer = empty(count, dtype=some.dtype)
            else:
                buffer = torch.empty(count, dtype=some.dtype, device=some.device)
            if sends:
                torch.cat([one.tensor.reshape(-1) for one in leaves], out=buffer)
            self._buffers.append(buffer)

    def issue(self, asynchronous: bool) -> Issued:
        """Begins the call."""
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
        """Copies the results apart; returns their tree."""
        for leaves, buffer in zip(self._groups, self._buffers, strict=True):
            outs = [one.target.tensor for one in leaves]
            parts = pieces(buffer, [out.numel() for out in outs])
            shaped = [one.view(out.shape) for one, out in zip(parts, outs, strict=True)]
            torch._foreach_copy_(outs, shaped)
        results = [None if one is None else one.target.finish() for one in self._leaves]
        return pytree.tree_unflatten(results, self._spec)

    def _check_devices(self, leaves: list[_Leaf]) -> None:
        if not leaves:
            raise ValueError("array: the tree holds no array")
        paths = {one.tensor.device: one.path for one in leaves}
        if len(paths) > 1:
            told = " and ".join(f"array{path} on {device}" for device, path in paths.items())
            raise ValueError(f"array: the tree's arrays are on several devices: {told}")


@lru_cache
def _paths(spec: pytree.TreeSpec) -> tuple[list[str], list[int]]:
    """The paths of a tree's leaves, and the leaves' numbers in the order of their paths."""
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(numbered)[0]]
    return paths, sorted(range(len(paths)), key=paths.__getitem__)


def _planned(path: str, given: Any, out: Any) -> _Leaf:
    view = view_of(given, f"array{path}")
    try:
        return _Leaf(path, view.tensor, target_of(view, given, out, tuple(view.tensor.shape)))
    except (TypeError, ValueError) as error:
        raise type(error)(f"out{path}{str(error).removeprefix('out')}") from error


def _outs(paths: list[str], out: Any) -> list[Any]:
    """The arrays of ``out``, by the paths of the tree's."""
    if out is None:
        return [None] * len(paths)
    leaves, spec = pytree.tree_flatten(out)
    given = dict(zip(_paths(spec)[0], leaves, strict=True))
    if given.keys() != set(paths):
        odd = sorted(given.keys() ^ set(paths))
        raise ValueError(f"out: expected a tree like array, got another one: {', '.join(odd)}")
    return [given[path] for path in paths]
