"""What ranks have to have in common, and errors that all of them see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["agree", "check_equal_steps", "check_saved"]


def agree(what: str, group: dist.ProcessGroup, checked: Callable[[], Mapping[str, Any]]) -> None:
    """Checks arguments of all ranks. Collective, so no rank waits for one that has raised.

    Args:
        what: is made, for errors.
        group: of the ranks.
        checked: checks this rank's arguments, and returns what has to be equal on all ranks, by
            the names that errors use.

    Raises:
        ValueError: ranks have different arguments, or ``checked`` has raised on another rank.
        Exception: what ``checked`` has raised on this rank.
    """
    error: Exception | None = None
    mine: Mapping[str, Any] = {}
    try:
        mine = checked()
    except Exception as raised:  # also what a user's function raises
        error = raised
    texts = {name: str(value) for name, value in mine.items()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (error and str(error), texts), group=group)
    if error is not None:
        raise error
    for rank, (text, _) in enumerate(everyone):
        if text is not None:
            raise ValueError(f"{what}: rank {rank} has failed to make it: {text}")
    _check_equal(what, [theirs for _, theirs in everyone])


def _check_equal(what: str, everyone: list[dict[str, str]]) -> None:
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in _differing(first, theirs):
            here, there = (one.get(name, "missing") for one in (first, theirs))
            raise ValueError(
                f"{what}: {name} is {there} on rank {rank}, and {here} on rank 0; give all ranks "
                "the same"
            )


def _differing(one: dict[str, str], other: dict[str, str]) -> Iterable[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def check_equal_steps(
    what: str, steps: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises on all ranks where they have made different numbers of steps. Collective.

    Args:
        what: is called, for errors.
        steps: of this rank.
        group: of the ranks.
        device: of what the group averages.

    Raises:
        ValueError: it names all ranks' steps.
    """
    mine = torch.tensor([steps], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    found = [int(one) for one in everyone]
    if len(set(found)) > 1:
        ranks = ", ".join(f"rank {rank} after {one}" for rank, one in enumerate(found))
        raise ValueError(
            f"{what}: expected all ranks to have made as many steps, got {ranks}; load states of "
            "the same step on all ranks, and call step() equally often"
        )


def check_saved(what: str, state: Any, keys: Iterable[str]) -> None:
    """Raises ValueError for a part of a state_dict that lacks a key, or has no number of steps."""
    missing = [key for key in keys if not isinstance(state, Mapping) or key not in state]
    if missing:
        raise ValueError(
            f"{what}.load_state_dict: expected what {what}.state_dict() gives, got a part of it "
            f"without {', '.join(map(repr, missing))}; load the whole state"
        )
    steps = state["steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(
            f"{what}.load_state_dict: expected a number of steps from 0 on, got {steps!r}"
        )
