"""Puts the outputs of micro-batches together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer
from torch.utils import _pytree as pytree

from dreamcomm.pipeline.split.chunks import is_replicated

__all__ = ["merge_outputs"]


def merge_outputs(outputs: Sequence[Any], output_merge_spec: Any = None) -> Any:
    """Makes one output of those of micro-batches.

    Args:
        outputs: one of each micro-batch, any pytrees.
        output_merge_spec: None, or a spec for the whole output or a pytree of specs:
            TensorChunkSpec(dim) concatenates along dim, torch's reducers (``sum_reducer``) reduce
            from their first value on, and _Replicate is one value that all have in common.

    Returns:
        The merged pytree. Without a spec tensors are concatenated along dimension 0, those without
        dimensions stacked, and other values that are equal are one. What does not fit together,
        such as tensors of different lengths, is a list of each micro-batch's.

    Raises:
        ValueError: a spec does not fit the outputs, or replicated values differ.
    """
    specs, structure = pytree.tree_flatten(output_merge_spec)
    groups = zip(*(_subtrees(structure, one, output_merge_spec) for one in outputs), strict=True)
    merged = [_merge_subtrees(list(group), spec) for group, spec in zip(groups, specs, strict=True)]
    return pytree.tree_unflatten(merged, structure)


def _subtrees(structure: pytree.TreeSpec, output: Any, spec: Any) -> list[Any]:
    """The parts of an output that each leaf of the spec is for."""
    try:
        return structure.flatten_up_to(output)
    except ValueError as error:
        # As in torch, a spec may say the structure anew where each leaf has its own.
        leaves = pytree.tree_leaves(output)
        if len(leaves) == structure.num_leaves:
            return leaves
        raise ValueError(f"output_merge_spec {spec} has another structure than {output}") from error


def _merge_subtrees(parts: list[Any], spec: Any) -> Any:
    flat = [pytree.tree_flatten(one) for one in parts]
    structure = flat[0][1]
    if any(one != structure for _, one in flat):
        if spec is None:
            return parts
        raise ValueError(
            f"outputs of micro-batches differ in structure, and are to merge by {spec}"
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_merge(list(column), spec) for column in columns], structure)


def _merge(values: list[Any], spec: Any) -> Any:
    if isinstance(spec, _CustomReducer):
        return reduce(spec.reduce_fn, values, spec.init_value)
    if is_replicated(spec):
        if not _are_equal(values):
            raise ValueError("outputs of micro-batches differ that were said to be the same")
        return values[0]
    if all(isinstance(one, Tensor) for one in values):
        return _join(values, spec.split_dim if isinstance(spec, TensorChunkSpec) else 0)
    return values[0] if _are_equal(values) else values


def _join(tensors: list[Tensor], dim: int) -> Tensor | list[Tensor]:
    """One tensor, or the list where shapes, dtypes or devices do not fit together."""
    first = tensors[0]
    if any(
        (one.dim(), one.dtype, one.device) != (first.dim(), first.dtype, first.device)
        for one in tensors
    ):
        return tensors
    if first.dim() == 0:
        return torch.stack(tensors)
    if not -first.dim() <= dim < first.dim():
        raise ValueError(f"an output of {first.dim()} dimensions cannot be joined along dim {dim}")
    dim %= first.dim()
    rests = {(*one.shape[:dim], *one.shape[dim + 1 :]) for one in tensors}
    return torch.cat(tensors, dim) if len(rests) == 1 else tensors


def _are_equal(values: list[Any]) -> bool:
    first = values[0]
    if isinstance(first, Tensor):
        return all(isinstance(one, Tensor) and torch.equal(first, one) for one in values[1:])
    try:
        return all(bool(one == first) for one in values[1:])
    except (RuntimeError, ValueError):  # of arrays, and of classes that hold tensors
        return False
