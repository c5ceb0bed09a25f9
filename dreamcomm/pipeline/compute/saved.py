"""Looks at the tensors that autograd nodes have saved for the backward pass, and frees them.

Autograd frees saved tensors for a whole pass or not at all. A saved tensor can however be given
hooks (torch.autograd.graph, "Hooks for saved tensors"): it then keeps what the packing hook
returns instead of the tensor. A hook that returns None frees the memory of one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import Node

__all__ = ["SavedTensors", "is_python_node"]


def is_python_node(node: Node) -> bool:
    """Says if the node is one of a ``torch.autograd.Function`` written in Python."""
    return isinstance(node, torch._C._FunctionBase)


def _pack_nothing(_: Any) -> None:
    return None


def _unpack_nothing(_: Any) -> Any:
    raise RuntimeError(
        "this tensor was freed by the input part of a split backward pass, after which only the "
        "gradients of parameters can be computed from the graph"
    )


class SavedTensors:
    """Finds nodes' saved tensors. One object serves one pass: it learns the names by type."""

    def __init__(self) -> None:
        self._names: dict[type, tuple[str, ...]] = {}

    def of(self, node: Node) -> Iterator[Any]:
        """Yields the node's ``SavedTensor`` objects, without unpacking them."""
        kind = type(node)
        names = self._names.get(kind)
        if names is None:
            own = ("_raw_saved_tensors",) if is_python_node(node) else tuple(vars(kind))
            names = tuple(name for name in own if name.startswith("_raw_saved_"))
            self._names[kind] = names
        for name in names:
            found = getattr(node, name)
            if isinstance(found, tuple):
                yield from found
            elif found is not None:
                yield found

    def have_hooks(self, node: Node) -> bool:
        """Says if a saved tensor is packed by hooks: recomputed by a checkpoint, or offloaded."""
        return any(saved.unpack_hook is not None for saved in self.of(node))

    def free(self, node: Node) -> None:
        """Frees what the node has saved. Tensors packed by others' hooks stay."""
        for saved in self.of(node):
            if saved.unpack_hook is None:
                try:
                    saved.register_hooks(_pack_nothing, _unpack_nothing)
                except RuntimeError:
                    continue  # nothing is saved there, or it was changed in place
