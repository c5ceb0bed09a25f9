"""What may travel between stages, and what losses are sums over."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from dreamcomm.buckets.averages import count_of
from dreamcomm.messages.dumping import SIMPLE, dumped

__all__ = ["Number", "check_values", "number_of", "own_versions"]

Number = int | float


def check_values(value: Any) -> None:
    """Raises TypeError for a value that cannot travel, also between stages of one rank."""
    if isinstance(value, Tensor):
        return
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor) and not isinstance(leaf, SIMPLE):
            dumped(leaf)


def number_of(count: object, who: str) -> Number:
    """A count of tokens, exact: an int, or a float for weights.

    Raises:
        TypeError, ValueError: see :func:`dreamcomm.buckets.averages.count_of`.
    """
    whole, weight = count_of(count, who)
    return whole if weight < 0 else weight


def own_versions(value: Any) -> Any:
    """Tensors that may be changed in place. Pieces of one batch would count changes together."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.data
    return pytree.tree_map_only(Tensor, own_versions, value)
