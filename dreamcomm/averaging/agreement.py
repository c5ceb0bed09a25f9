"""What ranks have to have in common, and errors that all of them see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist

from dreamcomm.ranks.agree import exchange, first_difference, gather_objects

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
    everyone = exchange(
        group,
        lambda: {name: str(value) for name, value in checked().items()},
        lambda one: ValueError(f"{what}: rank {one.rank} has failed to make it: {one.text}"),
    )
    found = first_difference(everyone)
    if found is not None:
        raise ValueError(f"{what}: {found.between_two()}; give all ranks the same")


def check_equal_steps(what: str, steps: int, group: dist.ProcessGroup) -> None:
    """Raises on all ranks where they have made different numbers of steps. Collective.

    Args:
        what: is called, for errors.
        steps: of this rank.
        group: of the ranks.

    Raises:
        ValueError: it names all ranks' steps.
    """
    found = gather_objects(group, steps)
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
