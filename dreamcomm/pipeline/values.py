"""What may travel between stages."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from dreamcomm.messages.dumping import SIMPLE, dumped

__all__ = ["check_values"]


def check_values(value: Any) -> None:
    """Raises TypeError for a value that cannot travel, also between stages of one rank."""
    if isinstance(value, Tensor):
        return
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor) and not isinstance(leaf, SIMPLE):
            dumped(leaf)
