"""Keeps new gradients of parameters apart from tensors that are still used.

Autograd may make a gradient of a parameter of memory that another tensor has, too: of
``x + self.bias`` both gradients may be the same tensor, or one a view of the other. In one process
that is mostly harmless, because the other is not used again. In a pipeline it may be on its way to
another stage, or wait for the second part of a split backward pass, while the next micro-batch adds
to the parameter's gradient in place.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["FreshGradients"]


class FreshGradients:
    """The parameters that have no gradient yet in a step."""

    def __init__(self) -> None:
        self._without: list[Tensor] = []

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Begins a step. Later additions to gradients that are there use memory of their own."""
        self._without = [one for one in parameters if one.grad is None]

    def set_apart(self) -> None:
        """Copies the gradients that a backward pass has made of memory that others have.

        Tensors that are read or sent later have to live when this is called.
        """
        if not self._without:
            return
        from dreamcomm import _C

        left = []
        for parameter in self._without:
            if parameter.grad is None:
                left.append(parameter)
            elif not _C.owns_memory(parameter.grad):
                parameter.grad = parameter.grad.clone()
        self._without = left
