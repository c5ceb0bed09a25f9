"""A call on a tree of plain NumPy arrays: the same in a tenth of the time, if they are small."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from dreamcomm.arrays.calls import Carrier, Issued
from dreamcomm.arrays.trees.layout import digest_of, paths_of
from dreamcomm.arrays.views import View
from dreamcomm.memory import empty

__all__ = ["NumpyTreeCall", "are_plain"]

# NumPy's types that are torch's, too, by torch's names.
PLAIN = {
    np.dtype(name): name
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


def are_plain(leaves: list[Any], outs: list[Any]) -> bool:
    """Whether all are NumPy arrays whose results need no further check."""
    for given, out in zip(leaves, outs, strict=True):
        if type(given) is not np.ndarray or given.dtype not in PLAIN:
            return False
        if out is None:
            continue
        if type(out) is not np.ndarray or out.dtype != given.dtype or out.shape != given.shape:
            return False
        flags = out.flags
        if not (flags.writeable and flags.c_contiguous):
            return False
    return bool(leaves) and (outs[0] is None or _are_apart(outs))


def _are_apart(arrays: list[NDArray[Any]]) -> bool:
    """Whether no two contiguous arrays share memory."""
    places = sorted((one.__array_interface__["data"][0], one.nbytes) for one in arrays)
    return all(begin + size <= after for (begin, size), (after, _) in itertools.pairwise(places))


class NumpyTreeCall:
    """A call on plain NumPy arrays: the same in a tenth of the time, if they are small."""

    def __init__(
        self,
        carrier: Carrier,
        leaves: list[NDArray[Any]],
        outs: list[NDArray[Any] | None],
        spec: pytree.TreeSpec,
        out: Any,
        operation: int,
        root: int,
    ) -> None:
        self._carrier, self._operation, self._root, self._spec = carrier, operation, root, spec
        self._leaves, self._outs, self._out = leaves, outs, out
        names = tuple(PLAIN[one.dtype] for one in leaves)
        self._groups: dict[str, list[int]] = {name: [] for name in sorted(set(names))}
        for number in paths_of(spec)[1]:
            self._groups[names[number]].append(number)
        self._digest = digest_of(spec, tuple(one.shape for one in leaves), names)
        self._buffers: list[Tensor] = []
        self.reads: list[tuple[str, View]] = []
        self.writes: list[View] = []

    def prepare(self) -> None:
        sends = self._operation >= 0 or self._carrier.backend.rank() == self._root
        for name, numbers in self._groups.items():
            arrays = [self._leaves[number] for number in numbers]
            count = sum(one.size for one in arrays)
            buffer = empty(count, dtype=getattr(torch, name))
            if sends:
                np.concatenate([one.reshape(-1) for one in arrays], out=buffer.numpy())
            self._buffers.append(buffer)

    def issue(self, asynchronous: bool) -> Issued:
        work: Any = self._carrier.door.run_together(
            self._buffers, self._operation, self._root, self._digest, asynchronous
        )
        return Issued(work.wait, work.is_completed)

    def finish(self) -> Any:
        results: list[Any] = [None] * len(self._leaves)
        for numbers, buffer in zip(self._groups.values(), self._buffers, strict=True):
            flat, begin = buffer.numpy(), 0
            for number in numbers:
                given, out = self._leaves[number], self._outs[number]
                end = begin + given.size
                part = flat[begin:end].reshape(given.shape)
                if out is None:
                    results[number] = part.copy()
                else:
                    out[...] = part
                begin = end
        return pytree.tree_unflatten(results, self._spec) if self._out is None else self._out
