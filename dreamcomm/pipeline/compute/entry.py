"""Turns received tensors into the start of a stage's autograd graph.

A received tensor that were a leaf could not be changed in place, but a stage may begin with
``nn.ReLU(inplace=True)``. All tensors of a micro-batch therefore leave one autograd node, the
*entry*. It stores nothing; it keeps the gradients that arrive for the caller to send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["Entry", "enter"]


class _Arrived:
    """The gradients that have arrived at one entry, by output of its node."""

    def __init__(self, count: int) -> None:
        self.gradients: list[Tensor | None] = [None] * count

    def add(self, arriving: Sequence[Tensor | None]) -> None:
        for index, gradient in enumerate(arriving):
            before = self.gradients[index]
            if gradient is not None:
                self.gradients[index] = gradient if before is None else before + gradient


class _Enter(torch.autograd.Function):
    """Aliases its tensors; passes no gradient on.

    The node knows only the list of gradients, not the :class:`Entry`, which knows the node: there
    is no reference cycle. The tensors come in a tuple, so autograd sees only ``token``, which
    makes the outputs require gradients.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, arrived: _Arrived, tensors: tuple[Tensor, ...]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.arrived = arrived
        # Detached tensors share the version counter: if the sender is in this process and has
        # saved the tensor for its own backward pass, a change in place is reported there.
        return tuple(one.detach() for one in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.arrived.add(gradients)
        return None, None, None


class Entry:
    """Where one micro-batch enters a stage's graph. It holds no activations.

    Attributes:
        edges: for each entered tensor its place in the graph, or None if it needs no gradient.
        node: the autograd node all of them leave; None if there is none.
    """

    def __init__(
        self, edges: Sequence[GradientEdge | None] = (), arrived: _Arrived | None = None
    ) -> None:
        self.edges = tuple(edges)
        self._arrived = _Arrived(0) if arrived is None else arrived

    @property
    def node(self) -> Node | None:
        return next((edge.node for edge in self.edges if edge is not None), None)

    def take(self) -> list[Tensor | None]:
        """Hands out the gradients that have arrived since the last call, and forgets them.

        Returns:
            One for each entered tensor. None where no gradient arrived. After two backward passes
            it is their sum. A gradient may share memory with one given to the backward pass, if
            the stage passes a tensor through.
        """
        taken, self._arrived.gradients = (
            self._arrived.gradients,
            [None] * len(self._arrived.gradients),
        )
        arrived = iter(taken)
        return [None if edge is None else next(arrived) for edge in self.edges]


def enter(tensors: Sequence[Tensor], needs_grad: Sequence[bool]) -> tuple[list[Tensor], Entry]:
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
    wanted = [
        index
        for index, (tensor, needs) in enumerate(zip(tensors, needs_grad, strict=True))
        if needs and (tensor.is_floating_point() or tensor.is_complex())
    ]
    entered: list[Tensor] = list(tensors)
    edges: list[GradientEdge | None] = [None] * len(entered)
    arrived = _Arrived(len(wanted))
    if wanted and torch.is_grad_enabled():
        token = torch.empty((), device="cpu", requires_grad=True)
        apply = cast(Callable[..., tuple[Tensor, ...]], _Enter.apply)
        made = apply(token, arrived, tuple(tensors[index] for index in wanted))
        for index, tensor in zip(wanted, made, strict=True):
            entered[index], edges[index] = tensor, get_gradient_edge(tensor)
    return entered, Entry(edges, arrived)
