"""Turns received tensors into the start of a stage's autograd graph.

A received tensor that were a leaf could not be changed in place, but a stage may begin with
``nn.ReLU(inplace=True)``. All tensors of a micro-batch therefore leave one autograd node, the
*entry* (csrc/c10d/autograd/entry.h). It stores nothing; it keeps the gradients that arrive for the
caller to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

if TYPE_CHECKING:
    from dreamcomm._C import EntryNode

__all__ = ["StageEntry", "enter"]


class StageEntry:
    """Where one micro-batch enters a stage's graph. It holds no activations.

    Args:
        wanted: for each entered tensor whether it needs a gradient.
        made: the node that those leave; None if there are none.

    Attributes:
        wanted: as given.
        node: the autograd node, or None.
    """

    def __init__(self, wanted: Sequence[bool] = (), made: EntryNode | None = None) -> None:
        self.wanted = tuple(wanted)
        self._made = made
        self.node: Node | None = None if made is None else made.node

    @property
    def edges(self) -> tuple[GradientEdge | None, ...]:
        """For each entered tensor its place in the graph, or None if it needs no gradient."""
        numbers = iter(range(len(self.wanted)))
        return tuple(
            GradientEdge(self.node, next(numbers), None) if one and self.node is not None else None
            for one in self.wanted
        )

    def take(self) -> list[Tensor | None]:
        """Hands out the gradients that have arrived since the last call, and forgets them.

        Returns:
            One for each entered tensor. None where no gradient arrived. After two backward passes
            it is their sum. A gradient may share memory with one given to the backward pass, if
            the stage passes a tensor through.
        """
        if self._made is None:
            return [None] * len(self.wanted)
        arrived = iter(self._made.take())
        return [next(arrived) if one else None for one in self.wanted]


def enter(tensors: Sequence[Tensor], needs_grad: Sequence[bool]) -> tuple[list[Tensor], StageEntry]:
    """Makes the start of a stage's graph.

    Args:
        tensors: what was received, or the caller's arguments. They are not copied.
        needs_grad: for each, if its gradient is wanted. It is ignored for tensors of whole
            numbers, and for all of them while gradients are off.

    Returns:
        The tensors to run the stage on, and the entry. A tensor that needs no gradient is
        returned as it is. The others share the memory of those given, are no leaves and may be
        changed in place.

    Raises:
        ValueError: if the two lists differ in length.
    """
    enabled = torch.is_grad_enabled()
    wanted = [
        enabled and needs and (tensor.is_floating_point() or tensor.is_complex())
        for tensor, needs in zip(tensors, needs_grad, strict=True)
    ]
    if not any(wanted):
        return list(tensors), StageEntry(wanted)
    from dreamcomm import _C

    made, node = _C.enter([t for t, one in zip(tensors, wanted, strict=True) if one])
    entered = iter(made)
    return [
        next(entered) if one else t for t, one in zip(tensors, wanted, strict=True)
    ], StageEntry(wanted, node)
