"""Trees of arrays in one call: all arrays of a dtype in one buffer of the shared heap."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dreamcomm.arrays.calls import Call, Carrier, Issued
from dreamcomm.arrays.operations import NO_OPERATION, Kind
from dreamcomm.arrays.targets import Target, target_of
from dreamcomm.arrays.views import view_of
from dreamcomm.memory import empty

__all__ = ["TreeCall", "is_tree"]


def is_tree(given: Any) -> bool:
    """Whether it is a container that torch's pytree knows, and no array."""
    return isinstance(given, (list, tuple, dict)) or not pytree.tree_is_leaf(given)


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
        self._carrier, self._operation, self._root = carrier, operation, root
        leaves, self._spec = pytree.tree_flatten_with_path(tree)
        self._paths = [pytree.keystr(path) for path, _ in leaves]
        outs = _outs(self._paths, out, tree)
        self._targets: list[Target | None] = []
        found: dict[str, list[tuple[str, Tensor, Tensor]]] = {}  # by dtype
        for path, (_, leaf), into in zip(self._paths, leaves, outs, strict=True):
            if leaf is None and into is None:
                self._targets.append(None)
                continue
            given, target = _planned(path, leaf, into)
            self._targets.append(target)
            found.setdefault(str(given.dtype), []).append((path, given, target.tensor))
        self._groups = [sorted(found[dtype], key=lambda one: one[0]) for dtype in sorted(found)]
        self._check_devices()
        self._digest = zlib.crc32(
            repr([(p, tuple(t.shape), t.dtype) for some in self._groups for p, t, _ in some]).encode()
        )
        self._buffers: list[Tensor] = []
        self.reads = [(f"array{p}", t) for some in self._groups for p, t, _ in some]
        self.writes = [one.tensor for one in self._targets if one is not None and not one.is_new]

    def prepare(self) -> None:
        """Copies the arrays together."""
        some = self._groups[0][0][1]
        sends = self._operation is not None or self._carrier.backend.rank() == self._root
        for arrays in self._groups:
            count = sum(tensor.numel() for _, tensor, _ in arrays)
            dtype = arrays[0][1].dtype
            if self._carrier.in_core(some):
                buffer = empty(count, dtype=dtype)
            else:
                buffer = torch.empty(count, dtype=dtype, device=some.device)
            if sends:
                torch.cat([_bytes(tensor) for _, tensor, _ in arrays], out=_bytes(buffer))
            self._buffers.append(buffer)

    def issue(self, asynchronous: bool) -> Issued:
        """Begins the call."""
        if not self._carrier.in_core(self._buffers[0]):
            return self._issue_apart(asynchronous)
        number = NO_OPERATION if self._operation is None else self._operation
        work: Any = self._carrier.door.run_together(
            self._buffers, number, self._root, self._digest, asynchronous
        )
        return Issued(work.wait, work.is_completed)

    def _issue_apart(self, asynchronous: bool) -> Issued:
        """One call for each dtype, where torch's backends or a device's carry them."""
        kind = Kind.BROADCAST if self._operation is None else Kind.ALL_REDUCE
        number = NO_OPERATION if self._operation is None else self._operation
        calls = [
            self._carrier.issue(Call(kind, one, one, number, self._root), asynchronous)
            for one in self._buffers
        ]
        return Issued(
            lambda: [one.wait() for one in calls],
            lambda: all(one.is_completed() for one in calls),
        )

    def finish(self) -> Any:
        """Copies the results apart; returns their tree."""
        for arrays, buffer in zip(self._groups, self._buffers, strict=True):
            parts = buffer.split([tensor.numel() for _, tensor, _ in arrays])
            outs = [out for _, _, out in arrays]
            with torch.no_grad():
                torch._foreach_copy_(
                    outs, [one.view(out.shape) for one, out in zip(parts, outs, strict=True)]
                )
        results = [None if one is None else one.finish() for one in self._targets]
        return pytree.tree_unflatten(results, self._spec)

    def _check_devices(self) -> None:
        where = {str(tensor.device): path for some in self._groups for path, tensor, _ in some}
        if not where:
            raise ValueError("array: the tree holds no array")
        if len(where) > 1:
            told = " and ".join(f"array{path} on {device}" for device, path in where.items())
            raise ValueError(f"array: the tree's arrays are on several devices: {told}")


def _planned(path: str, leaf: Any, out: Any) -> tuple[Tensor, Target]:
    """The tensor of a leaf, and where its result goes."""
    try:
        given = view_of(leaf, f"array{path}")
        return given.tensor, target_of(given, leaf, out, tuple(given.tensor.shape))
    except (TypeError, ValueError) as error:
        if not str(error).startswith("out:"):
            raise
        raise type(error)(f"out{path}{str(error)[3:]}") from error


def _outs(paths: Sequence[str], out: Any, tree: Any) -> list[Any]:
    """The arrays of ``out``, by the paths of the tree's."""
    if out is None:
        return [None] * len(paths)
    given = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(out)[0]}
    if given.keys() != set(paths):
        odd = sorted(given.keys() ^ set(paths))
        raise ValueError(f"out: expected a tree like array, got another one: {', '.join(odd)}")
    return [given[path] for path in paths]


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor's elements as bytes: torch.cat does not know each type."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
