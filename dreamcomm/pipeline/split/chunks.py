"""Cuts a batch into micro-batches.

Tensors are cut into near-equal pieces along dimension 0, whether or not the number of micro-batches
divides the rows; all else is given to each micro-batch. torch's chunk specs say otherwise for an
argument, and MicroBatches holds pieces that the user made himself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

__all__ = ["MicroBatches", "is_replicated", "split_batch", "split_targets"]


class MicroBatches:
    """An argument that is already cut. Shapes and dtypes may differ from piece to piece.

    Args:
        values: one of each micro-batch, in order.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]

    def __repr__(self) -> str:
        return f"MicroBatches({self.values!r})"


@dataclass
class _Leaf:
    """A leaf of the arguments: what the user calls it, its value, and how it is cut."""

    name: str
    value: Any
    spec: Any

    @property
    def dim(self) -> int | None:
        """The dimension that is cut; None for what goes to all micro-batches."""
        if is_replicated(self.spec):
            return None
        dim: int = self.spec.split_dim if isinstance(self.spec, TensorChunkSpec) else 0
        if isinstance(self.value, BlockMask):
            return 0 if self.value.kv_num_blocks.size(0) > 1 else None
        return dim if isinstance(self.value, Tensor) and self.value.dim() else None

    def rows(self, dim: int) -> int:
        value = self.value.kv_num_blocks if isinstance(self.value, BlockMask) else self.value
        if not -value.dim() <= dim < value.dim():
            raise ValueError(f"{self.name}: cannot be cut along dim {dim}, it has {value.dim()}")
        return int(value.size(dim))

    def pieces(self, count: int) -> Sequence[Any]:
        if isinstance(self.value, MicroBatches):
            return self.value.values
        dim = self.dim
        if dim is None:
            return [self.value] * count
        if isinstance(self.value, BlockMask):
            from torch.distributed.pipelining.microbatch import _split_block_mask

            return _split_block_mask(self.value, count)
        return torch.tensor_split(self.value, count, dim)


def is_replicated(spec: Any) -> bool:
    """Whether a chunk spec gives its argument to all micro-batches; torch takes the class too."""
    return spec is _Replicate or isinstance(spec, _Replicate)


def split_batch(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    microbatches: int,
    args_chunk_spec: Sequence[Any] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Cuts the arguments of a step.

    Args:
        args, kwargs: of the whole batch, any pytrees.
        microbatches: how many to make.
        args_chunk_spec: a spec for each positional argument: TensorChunkSpec(dim), torch's
            _Replicate, or None for the usual way. It counts for all tensors of its argument, or is
            a pytree of such specs.
        kwargs_chunk_spec: the same by keyword; one that is not given has no effect.

    Returns:
        Positional and keyword arguments of each micro-batch.

    Raises:
        ValueError: an argument has fewer rows than there are micro-batches, arguments have
            different numbers of rows, or a spec does not fit its argument.
    """
    kwargs = kwargs or {}
    if args and args_chunk_spec is not None and len(args_chunk_spec) != len(args):
        raise ValueError(
            f"args_chunk_spec has {len(args_chunk_spec)} specs for {len(args)} positional arguments"
        )
    specs = args_chunk_spec or [None] * len(args)
    leaves = [
        leaf
        for index, (value, spec) in enumerate(zip(args, specs, strict=False))
        for leaf in _leaves(f"argument {index}", value, spec)
    ]
    for name, value in kwargs.items():
        leaves += _leaves(f"argument {name!r}", value, (kwargs_chunk_spec or {}).get(name))
    _, structure = _flatten((tuple(args), kwargs))
    return _cut(leaves, structure, microbatches)


def split_targets(target: Any, microbatches: int) -> list[Any]:
    """Cuts targets along dimension 0, as ``split_batch`` does arguments.

    Args:
        target: any pytree, or MicroBatches.
        microbatches: how many to make.

    Returns:
        The target of each micro-batch.

    Raises:
        ValueError: as for ``split_batch``.
    """
    _, structure = _flatten(target)
    return _cut(list(_leaves("target", target, None)), structure, microbatches)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, BlockMask | MicroBatches)


def _flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten(value, is_leaf=_is_leaf)


def _leaves(name: str, value: Any, spec: Any) -> Iterator[_Leaf]:
    """The leaves of an argument, each with its spec."""
    specs, structure = pytree.tree_flatten(spec)
    try:
        subtrees = structure.flatten_up_to(value)
    except ValueError as error:
        raise ValueError(f"{name}: its chunk spec {spec} has another structure") from error
    each = [one for one, subtree in zip(specs, subtrees, strict=True) for _ in _flatten(subtree)[0]]
    paths, _ = pytree.tree_flatten_with_path(value, is_leaf=_is_leaf)
    for one, (path, leaf) in zip(each, paths, strict=True):
        yield _Leaf(name + pytree.keystr(path), leaf, one)


def _cut(leaves: list[_Leaf], structure: pytree.TreeSpec, count: int) -> list[Any]:
    if count < 1:
        raise ValueError(f"expected at least 1 micro-batch, got {count}")
    _check(leaves, count)
    pieces = [leaf.pieces(count) for leaf in leaves]
    return [
        pytree.tree_unflatten([one[index] for one in pieces], structure) for index in range(count)
    ]


def _check(leaves: list[_Leaf], count: int) -> None:
    first: tuple[str, int] | None = None
    for leaf in leaves:
        if isinstance(leaf.value, MicroBatches):
            if len(leaf.value) != count:
                raise ValueError(
                    f"{leaf.name}: expected {count} micro-batches, got {len(leaf.value)}"
                )
            continue
        dim = leaf.dim
        if dim is None:
            continue
        rows = leaf.rows(dim)
        if rows < count:
            raise ValueError(f"{leaf.name}: {rows} rows do not make {count} micro-batches")
        first = first or (leaf.name, rows)
        if rows != first[1]:
            raise ValueError(
                f"{leaf.name} has {rows} rows and {first[0]} has {first[1]}, "
                f"which are to be cut into {count} micro-batches alike; "
                "a chunk spec says which dimension is cut, or that an argument is not"
            )
