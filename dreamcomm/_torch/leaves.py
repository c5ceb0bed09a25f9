"""The tensors that a backward pass adds gradients to."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["leaves_below"]


def leaves_below(roots: Iterable[Node]) -> list[Tensor]:
    """The leaves below these nodes, in an order that the graph alone decides."""
    stack = list(dict.fromkeys(roots))
    seen = dict.fromkeys(stack)  # keeps the order
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen[node] = None
                stack.append(node)
    return [node.variable for node in seen if type(node).__name__ == "AccumulateGrad"]  # type: ignore[attr-defined]
