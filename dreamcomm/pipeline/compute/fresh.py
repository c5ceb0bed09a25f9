"""Keeps new gradients of parameters apart from gradients that are still used.

Autograd may make a gradient of a parameter of the memory of one that flows on: of ``x + self.bias``
both may be the same tensor, or one a view of the other. In one process that is harmless, because
the other is not used again. In a pipeline it may be on its way to another stage, or wait for the
second part of a split backward pass, while the next micro-batch adds to the parameter's gradient in
place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["FreshGradients"]


class FreshGradients:
    """The parameters that have no gradient yet in a step."""

    def __init__(self) -> None:
        self._without: list[nn.Parameter] = []

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begins a step. Later additions to gradients that are there use memory of their own."""
        self._without = [one for one in parameters if one.grad is None]

    def memory_of(self, gradients: Iterable[Tensor | None]) -> set[int]:
        """Where these gradients lie; nothing once all parameters have gradients of their own.

        It keeps none of them. Memory that is freed meanwhile costs at most a copy.
        """
        if not self._without:
            return set()
        return {_memory(one) for one in gradients if one is not None} - {0}

    def set_apart(self, used: set[int]) -> None:
        """Copies the gradients that a backward pass has made of memory that is still used.

        Args:
            used: where gradients lie that were in the pass, and are read or sent later.
        """
        if not self._without:
            return
        left = []
        for parameter in self._without:
            if parameter.grad is None:
                left.append(parameter)
            elif _memory(parameter.grad) in used:
                parameter.grad = parameter.grad.clone()
        self._without = left


def _memory(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
