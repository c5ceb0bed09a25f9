"""What may travel between stages."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["SIMPLE", "check_values", "dumped"]

SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype)


class _Pickler(pickle.Pickler):
    """Refuses tensors: those that travel are leaves of the tree, and are described apart."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise TypeError("it holds a tensor")
        return NotImplemented


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
            f"a value between stages cannot be sent: {error}; stages exchange tensors, plain "
            "values, and tuples, lists and dicts of them. A class of your own that holds tensors "
            "has to be registered (torch.utils._pytree.register_dataclass or register_pytree_node)"
        ) from error
    return data.getvalue()


def check_values(value: Any) -> None:
    """Raises TypeError for a value that cannot travel, also between stages of one rank."""
    if isinstance(value, Tensor):
        return
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor) and not isinstance(leaf, SIMPLE):
            dumped(leaf)
