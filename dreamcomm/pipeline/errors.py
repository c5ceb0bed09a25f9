"""Errors of a pipeline, as each rank raises them."""

from __future__ import annotations

from dataclasses import dataclass

from dreamcomm.ranks.agree import Failed
from dreamcomm.ranks.errors import Error

__all__ = ["Failure", "PipelineError"]


@dataclass(frozen=True)
class Failure(Failed):
    """Why a rank has stopped in a step: its rank in the pipeline's mesh, in the mesh's order.

    Attributes:
        action: that the rank was at, such as "1F3"; empty: between actions.
        stage, microbatch: of the action; -1: none.
    """

    action: str = ""
    stage: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        where = f"rank {self.rank}"
        if self.action:
            where += f", stage {self.stage}, micro-batch {self.microbatch} (action {self.action})"
        return f"{where}: {self.kind}: {self.text}"


class PipelineError(Error, RuntimeError):
    """A step has failed. All ranks of the mesh raise it, with the same failure.

    After an error of one rank the group is whole: the next step works. After the loss of a rank it
    is not.

    Attributes:
        failure: the first one, by rank.
        rank, stage, microbatch, action: as in the failure.
    """

    def __init__(self, text: str, failure: Failure) -> None:
        super().__init__(text)
        self.failure = failure
        self.rank, self.action = failure.rank, failure.action
        self.stage, self.microbatch = failure.stage, failure.microbatch
