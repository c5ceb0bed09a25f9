"""What ways of training offer each other, so that none of them imports another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import nn

__all__ = ["ClipPart", "ReducesGradients"]


@dataclass(frozen=True)
class ClipPart:
    """Parameters whose gradients count once in a norm.

    Attributes:
        parameters: in the order in which their squares are added.
        group: all its ranks hold the same gradients, and share the work of adding squares.
    """

    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup


@runtime_checkable
class ReducesGradients(Protocol):
    """A module that reduces its gradients over ranks in backward passes.

    A pipeline holds back the reduction of all micro-batches except the last, or of all, and reduces
    once at the end; a norm over several modules takes each one's parts.
    """

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside add to this rank's gradients alone."""

    def reduce_gradients(self) -> None:
        """Reduces what has accumulated. Collective."""

    def clip_parts(self) -> list[ClipPart]:
        """What a norm of all gradients consists of here."""
