"""Bytes of the parts of a message that are not tensors."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["SIMPLE", "dumped"]

SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype)


class _Pickler(pickle.Pickler):
    """Refuses tensors: those that travel are leaves of the tree, and are described apart."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise TypeError("it holds a tensor")
        if isinstance(value, pytree.TreeSpec) and value.num_nodes == value.num_leaves == 1:
            return _leaf_spec, ()  # torch warns where its own form is unpickled
        return NotImplemented


def _leaf_spec() -> pytree.TreeSpec:
    """The structure of a value that is one leaf."""
    return pytree.tree_flatten(None)[1]


def dumped(value: Any) -> bytes:
    """The bytes of a value without tensors.

    Raises:
        TypeError: it cannot be pickled, or an object in it holds a tensor, whose gradient would be
            lost.
    """
    data = io.BytesIO()
    try:
        _Pickler(data, protocol=5).dump(value)
    except Exception as error:
        raise TypeError(
            f"a value cannot be sent: {error}; messages hold tensors, plain values, and tuples, "
            "lists and dicts of them. A class of your own that holds tensors has to be registered "
            "(torch.utils._pytree.register_dataclass or register_pytree_node)"
        ) from error
    return data.getvalue()
