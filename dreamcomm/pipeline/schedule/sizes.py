"""Checks of the sizes of a schedule, and the placement of stages in a loop over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from dreamcomm.pipeline.schedule.actions import Action
from dreamcomm.pipeline.schedule.schedule import Schedule

__all__ = ["check_sizes", "looped"]


def check_sizes(function: str, ranks: int, microbatches: int, stages: int) -> None:
    """Refuses sizes that no schedule has.

    Args:
        function: the caller, for the message.
        ranks, microbatches, stages: how many.

    Raises:
        ValueError: a number is below 1, or ``stages`` is not a multiple of ``ranks``.
    """
    for what, number in (("rank", ranks), ("micro-batch", microbatches), ("stage", stages)):
        if number < 1:
            raise ValueError(f"{function}: expected at least one {what}, got {number}")
    if stages % ranks:
        raise ValueError(
            f"{function}: {stages} stages cannot be shared evenly by {ranks} ranks: "
            f"make the number of stages a multiple of the number of ranks"
        )


def looped(
    name: str, rows: Sequence[tuple[Action, ...]], microbatches: int, stages: int
) -> Schedule:
    """The schedule of these rows, with stage s on rank ``s % len(rows)``.

    Args:
        name: of the schedule.
        rows: the steps of each rank.
        microbatches, stages: how many.
    """
    rank_of = tuple(stage % len(rows) for stage in range(stages))
    return Schedule(name, stages, microbatches, tuple(rows), rank_of)
