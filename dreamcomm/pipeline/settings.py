"""What a pipeline was made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dreamcomm.buckets.scaling import GradScaler

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What a pipeline was made with; see :class:`Pipeline`.

    Attributes:
        scaler: scales losses, or None.
        adds_means: with counts, a step may add its mean to that of an earlier one.
    """

    loss_fn: Callable[..., Any] | None
    args_chunk_spec: tuple[Any, ...] | None
    kwargs_chunk_spec: dict[str, Any] | None
    output_merge_spec: Any
    scale_grads: bool | str
    adds_means: bool
    accumulate: int
    loss: str
    checkpoint: bool
    scaler: GradScaler | None = None

    @property
    def counted(self) -> bool:
        """Whether gradients are divided by counts."""
        return self.scale_grads == "count"
