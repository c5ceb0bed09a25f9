"""The graph below some nodes, and the tensors that a backward pass adds gradients to."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["is_leaf", "leaves_of", "nodes_below"]


def nodes_below(roots: Iterable[Node]) -> list[Node]:
    """These nodes and all below them, in an order that the graph alone decides."""
    stack = list(dict.fromkeys(roots))
    seen = dict.fromkeys(stack)  # keeps the order
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen:
                seen[node] = None
                stack.append(node)
    return list(seen)


def is_leaf(node: Node) -> bool:
    """True if the node adds to the gradient of a leaf."""
    return type(node).__name__ == "AccumulateGrad"


def leaves_of(nodes: Iterable[Node]) -> list[Tensor]:
    """The leaves whose gradients these nodes add to."""
    return [node.variable for node in nodes if is_leaf(node)]  # type: ignore[attr-defined]
