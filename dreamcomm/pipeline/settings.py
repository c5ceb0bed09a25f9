"""What a pipeline was made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What a pipeline was made with; see :class:`Pipeline`."""

    loss_fn: Callable[..., Any] | None
    args_chunk_spec: tuple[Any, ...] | None
    kwargs_chunk_spec: dict[str, Any] | None
    output_merge_spec: Any
    scale_grads: bool | str
    accumulate: int
    loss: str
    checkpoint: bool
