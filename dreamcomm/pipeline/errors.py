"""Errors of a pipeline, as each rank raises them."""

from __future__ import annotations

from dataclasses import dataclass

from dreamcomm.ranks.errors import Error

__all__ = ["Failure", "PipelineError", "text_of"]


@dataclass(frozen=True)
class Failure:
    """Why a rank has stopped in a step.

    Attributes:
        rank: that failed, of the pipeline's mesh in its order.
        kind: the exception's class, such as "ValueError".
        text: the exception's.
        action: that the rank was at, such as "1F3"; empty: between actions.
        stage, microbatch: of the action; -1: none.
    """

    rank: int
    kind: str
    text: str
    action: str = ""
    stage: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        where = f"rank {self.rank}"
        if self.action:
            where += f", stage {self.stage}, micro-batch {self.microbatch} (action {self.action})"
        return f"{where}: {self.kind}: {self.text}"


def text_of(error: BaseException) -> str:
    """An exception's text. Its class may be the user's, and fail to give one."""
    try:
        return str(error)
    except Exception as raised:
        return f"(its text cannot be made: {type(raised).__name__})"


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
