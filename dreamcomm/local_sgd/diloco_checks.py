"""Checks what users give to DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dreamcomm.averaging.agreement import check_saved
from dreamcomm.averaging.model import check_count

__all__ = ["check_diloco", "check_first_weights", "check_fragments", "check_state"]

STATE_KEYS = (
    "steps", "settled", "schedule", "outer", "outer_parameters", "flights", "under_way"
)  # fmt: skip
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


def check_fragments(fragments: int, parameters: int) -> None:
    """Raises ValueError for more fragments than parameters."""
    if fragments > parameters:
        raise ValueError(
            f"DiLoCo: expected at most a fragment for each of {parameters} parameters, got "
            f"{fragments}"
        )


def check_first_weights(
    names: Sequence[str], parameters: Sequence[Tensor], outer: Sequence[Tensor]
) -> None:
    """Raises RuntimeError for weights that the first outer step would replace, or that are NaN.

    Args:
        names: of the parameters.
        parameters: the model's.
        outer: what they were when DiLoCo was made.
    """
    for name, own, start in zip(names, parameters, outer, strict=True):
        kind, made = (f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (own, start))
        if kind != made:
            raise RuntimeError(
                f"DiLoCo.step: parameter {name!r} is {kind}, and was {made} when DiLoCo was made; "
                "convert or move the model before that"
            )
        if bool(start.isnan().any()):
            raise RuntimeError(
                f"DiLoCo.step: parameter {name!r} had NaN already when DiLoCo was made, before the "
                "first step, and all ranks would get it; make DiLoCo of weights without NaN"
            )
        if not torch.equal(own, start):
            raise RuntimeError(
                f"DiLoCo.step: parameter {name!r} has other weights than when DiLoCo was made, and "
                "the outer parameters are those of then; load weights before DiLoCo is made, or "
                "call take_weights() on all ranks afterwards"
            )


def check_state(
    state: Any,
    parameters: Sequence[Tensor],
    fragments: Sequence[Sequence[int]],
    schedule: dict[str, int],
) -> None:
    """Raises ValueError for a state that lacks a part, or is of another model or schedule.

    Args:
        state: DiLoCo's own part of a state_dict.
        parameters: the outer ones.
        fragments: the numbers of each one's parameters.
        schedule: this object's.
    """
    check_saved("DiLoCo", state, STATE_KEYS)
    shapes = [tuple(one.shape) for one in state["outer_parameters"]]
    expected = [tuple(one.shape) for one in parameters]
    if shapes != expected:
        raise ValueError(
            f"DiLoCo.load_state_dict: expected outer parameters of the shapes {expected}, got "
            f"{shapes}; load the checkpoint of this model"
        )
    _check_flights(state, schedule)
    for flight in state["flights"]:
        numel = sum(parameters[number].numel() for number in fragments[flight["fragment"]])
        found = sum(one.numel() for one in flight["means"])
        if found != numel:
            raise ValueError(
                f"DiLoCo.load_state_dict: expected a mean of {numel} elements of fragment "
                f"{flight['fragment']}, got {found}; load the checkpoint of this model"
            )


def _check_flights(state: dict[str, Any], schedule: dict[str, int]) -> None:
    """None is lost, and none is of another schedule."""
    flights, saved = state["flights"], dict(state["schedule"])
    if len(flights) != state["under_way"]:
        raise ValueError(
            f"DiLoCo.load_state_dict: expected {state['under_way']} means under way, got "
            f"{len(flights)}; the state was loaded into a smaller one, as by "
            "torch.distributed.checkpoint.load: load the whole"
        )
    if flights and saved != schedule:
        raise ValueError(
            f"DiLoCo.load_state_dict: the state has means under way of {saved}, and this is "
            f"{schedule}; load it into the same, or save it after synchronize()"
        )
