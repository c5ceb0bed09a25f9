"""The error of a schedule that cannot run."""

from __future__ import annotations

from dreamcomm.pipeline.schedule.actions import Action
from dreamcomm.ranks.errors import Error

__all__ = ["ScheduleError", "fault"]


class ScheduleError(Error, ValueError):
    """A schedule that cannot run.

    Attributes:
        rank: the rank at fault; None where it is the whole schedule.
        action: the step at fault; None where it is the whole schedule.
    """

    def __init__(self, text: str, rank: int | None = None, action: Action | None = None) -> None:
        super().__init__(text)
        self.rank = rank
        self.action = action


def fault(rank: int, action: Action, problem: str, remedy: str) -> ScheduleError:
    """The error of one step.

    Args:
        rank: the rank at fault.
        action: the step at fault.
        problem: what is wrong; follows the name of the step.
        remedy: what to do.
    """
    microbatch = "" if action.microbatch is None else f", micro-batch {action.microbatch}"
    where = f"rank {rank}, stage {action.stage}{microbatch}"
    return ScheduleError(f"{where}: {action} {problem}: {remedy}", rank, action)
