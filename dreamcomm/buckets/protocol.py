"""What ways of training offer each other, so that none of them imports another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["ClipPart", "GradientPart", "ReducesGradients", "is_sharded"]


@dataclass(frozen=True)
class GradientPart:
    """One rank's elements of a gradient.

    Attributes:
        elements: of this rank, flat. They are scaled in place.
        numel: elements of the whole gradient.
        ranges: for each rank the first of its elements, and how many it has. What all ranks have
            counts as rank 0's.
        parameter: whose gradient it is, as it is found in ``ClipPart.parameters``.
    """

    elements: Tensor
    numel: int
    ranges: Sequence[tuple[int, int]]
    parameter: nn.Parameter | None = None


@dataclass(frozen=True)
class ClipPart:
    """Parameters whose gradients count once in a norm.

    Attributes:
        parameters: in the order in which their squares are added.
        group: all its ranks hold the same gradients, and share the work of adding squares.
        parts: gives each rank's elements of the gradients in place of that, where ranks do not hold
            the same; None: they do.
    """

    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup
    parts: Callable[[], Sequence[GradientPart]] | None = None


def is_sharded(gradient: Tensor | None) -> bool:
    """Whether a sharded optimizer has put a tensor without memory in a gradient's place."""
    return bool(getattr(type(gradient), "stands_for_shards", False))


@runtime_checkable
class ReducesGradients(Protocol):
    """What reduces gradients over ranks in backward passes: a module, or an optimizer.

    A pipeline holds back the reduction of all micro-batches except the last, or of all, and reduces
    once at the end; a norm over several modules takes each one's parts.
    """

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside add to this rank's gradients alone."""

    def reduce_gradients(self) -> None:
        """Reduces what has accumulated. Collective."""

    def clip_parts(self) -> list[ClipPart]:
        """What a norm of all gradients consists of here."""
