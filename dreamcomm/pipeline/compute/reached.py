"""Finds the tensors that a stage's backward passes add gradients to.

Autograd adds to every leaf that a forward pass has used, wherever it belongs: a parameter that a
loss function has captured, or an input that requires a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge

from dreamcomm._torch.leaves import leaves_of, nodes_below

__all__ = ["Reached"]


class Reached:
    """The leaves of a step's graphs. It looks at each stage's first micro-batch of a step."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._looked: set[int] = set()
        self._take_in: Callable[[Tensor], None] = lambda _: None

    def begin(self, known: Iterable[Tensor], take_in: Callable[[Tensor], None]) -> None:
        """Begins a step.

        Args:
            known: the leaves whose gradients are the step's.
            take_in: is called with each other one, before its first gradient of the step; it may
                raise.
        """
        self._known, self._take_in = {id(one) for one in known}, take_in
        self._looked.clear()

    def look(self, stage: int, roots: Sequence[GradientEdge]) -> None:
        """Looks at the graph that a stage's forward pass has made."""
        if stage in self._looked:
            return
        self._looked.add(stage)
        for leaf in leaves_of(nodes_below(root.node for root in roots)):
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self._take_in(leaf)
