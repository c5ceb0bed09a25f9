"""Checks what users give to DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dreamcomm.local_sgd.model import check_count

__all__ = ["check_diloco", "check_state"]

WIRE = (None, torch.bfloat16, torch.float16, torch.float32)


def check_diloco(
    every: int, fragments: int, overlap: int, wire_dtype: torch.dtype | None, alpha: float
) -> None:
    """Raises ValueError for numbers that make no schedule."""
    check_count("DiLoCo", "every", every, 1)
    check_count("DiLoCo", "fragments", fragments, 1)
    check_count("DiLoCo", "overlap", overlap, 0)
    if overlap >= every:
        raise ValueError(
            f"DiLoCo: expected overlap below every, so that a fragment has one mean under way, got "
            f"overlap {overlap} and every {every}"
        )
    if wire_dtype not in WIRE:
        raise ValueError(f"DiLoCo: expected wire_dtype to be one of {WIRE}, got {wire_dtype}")
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"DiLoCo: expected alpha from 0 to below 1, got {alpha}")


def check_state(state: dict[str, Any], parameters: Sequence[Tensor], fragments: int) -> None:
    """Raises ValueError for a state of another model, or of other fragments."""
    shapes = [tuple(one.shape) for one in state["outer_parameters"]]
    expected = [tuple(one.shape) for one in parameters]
    if shapes != expected:
        raise ValueError(
            f"DiLoCo.load_state_dict: expected outer parameters of the shapes {expected}, got "
            f"{shapes}; load the checkpoint of this model"
        )
    for flight in state["flights"]:
        if flight["fragment"] >= fragments:
            raise ValueError(
                f"DiLoCo.load_state_dict: a mean of fragment {flight['fragment']} was under way, "
                f"and there are {fragments} fragments; give the same settings as before"
            )
