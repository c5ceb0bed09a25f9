"""The arrays of a tree, in an order that all ranks have."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["digest_of", "is_tree", "outs_of", "paths_of"]


def is_tree(given: Any) -> bool:
    """Whether it is a container that torch's pytree knows, and no array."""
    if isinstance(given, (np.ndarray, Tensor)):
        return False
    return isinstance(given, (list, tuple, dict)) or not pytree.tree_is_leaf(given)


@lru_cache
def digest_of(spec: pytree.TreeSpec, shapes: tuple[Any, ...], dtypes: tuple[Any, ...]) -> int:
    """A digest of what has to be equal on all ranks: paths, shapes and dtypes."""
    paths, order = paths_of(spec)
    told = [(paths[n], shapes[n], dtypes[n]) for n in order if dtypes[n] is not None]
    return zlib.crc32(repr(told).encode())


@lru_cache
def paths_of(spec: pytree.TreeSpec) -> tuple[list[str], list[int]]:
    """The paths of a tree's leaves, and the leaves' numbers in the order of their paths."""
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(numbered)[0]]
    return paths, sorted(range(len(paths)), key=paths.__getitem__)


def outs_of(spec: pytree.TreeSpec, leaves: list[Any], out: Any) -> list[Any]:
    """The arrays of ``out``, by the paths of the tree's. Raises ValueError if it is unlike."""
    if out is None:
        return [None] * len(leaves)
    if not is_tree(out):
        raise ValueError(f"out: expected a tree like array, got one {type(out).__name__}")
    outs, other = pytree.tree_flatten(out)
    paths = paths_of(spec)[0]
    given = dict(zip(paths_of(other)[0], outs, strict=True))
    if given.keys() != set(paths):
        odd = sorted(given.keys() ^ set(paths))
        raise ValueError(f"out: expected a tree like array, got another one: {', '.join(odd)}")
    found = [given[path] for path in paths]
    for path, leaf, into in zip(paths, leaves, found, strict=True):
        if (leaf is None) != (into is None):
            expected = "None" if leaf is None else "an array"
            raise ValueError(f"out{path}: expected {expected}, got {type(into).__name__}")
    return found
