"""A schedule: the steps of each rank, in order, and the rank of each stage."""

from __future__ import annotations

from dataclasses import dataclass

from dreamcomm.pipeline.schedule.actions import BACKWARDS, COMPUTES, MESSAGES, Action

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline does in one step of training.

    A schedule is a plain value. It may be wrong: ``check`` says whether it can run.

    Attributes:
        name: for people.
        stages: number of stages.
        microbatches: number of micro-batches.
        ranks: a row for each rank, with None for an idle cell. Idle cells have no effect.
        rank_of: the rank of each stage.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action | None, ...], ...]
    rank_of: tuple[int, ...]

    def actions(self, rank: int) -> tuple[Action, ...]:
        """A rank's steps without idle cells."""
        return tuple(action for action in self.ranks[rank] if action is not None)

    def parts(self, rank: int) -> tuple[Action, ...]:
        """A rank's steps without idle cells, with OVERLAP_F_B replaced by its parts."""
        return tuple(part for action in self.actions(rank) for part in action.parts)

    def computes(self, rank: int) -> tuple[Action, ...]:
        """A rank's F, B, I and W, with OVERLAP_F_B replaced by its parts."""
        return tuple(part for part in self.parts(rank) if part.kind in COMPUTES)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on a rank, ascending."""
        return tuple(stage for stage, place in enumerate(self.rank_of) if place == rank)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def has_messages(self) -> bool:
        """Whether any rank sends or receives."""
        return any(part.kind in MESSAGES for rank in range(self.world) for part in self.parts(rank))

    @property
    def forward_only(self) -> bool:
        """Whether the schedule has no backward."""
        rows = (self.parts(rank) for rank in range(self.world))
        return not any(part.kind in BACKWARDS for row in rows for part in row)
