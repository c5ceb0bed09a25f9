"""One step of a rank in a pipeline, and its text form.

The text form is the one that torch writes and reads: stage, kind, micro-batch::

    0F0                      forward of stage 0 for micro-batch 0
    2SEND_F1                 stage 2 sends its output of micro-batch 1
    (0F3;7B1)OVERLAP_F_B     both parts as one step
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

__all__ = ["BACKWARDS", "COMPUTES", "MESSAGES", "Action", "Kind"]


class Kind(str, Enum):
    """What a step does. Its value is its name in the text form.

    Attributes:
        F: forward.
        B: backward for inputs and weights.
        I: backward for inputs alone.
        W: backward for weights alone.
        SEND_F, RECV_F: sends a stage's output, receives a stage's input.
        SEND_B, RECV_B: sends the gradient of a stage's input, receives that of its output.
        UNSHARD, RESHARD, REDUCE_GRAD: steps of sharded data parallelism, which no schedule of
            this package makes.
        OVERLAP_F_B: a forward and a backward as one step.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"


COMPUTES = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W})
MESSAGES = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})

SINGLE = re.compile(r"(\d+)([A-Z_]+)(\d*)", re.ASCII)
SEVERAL = re.compile(r"\((.*)\)([A-Z_]+)", re.ASCII)


class Action(NamedTuple):
    """One step of a rank.

    Attributes:
        stage: its stage; -1 for a step of several parts.
        kind: what it does.
        microbatch: its micro-batch. None for a step of several parts, UNSHARD, RESHARD and
            REDUCE_GRAD.
        sub: the parts of OVERLAP_F_B, in order.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    sub: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.sub:
            return f"({';'.join(str(part) for part in self.sub)}){self.kind.value}"
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.kind.value}{microbatch}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """The parts of OVERLAP_F_B; of any other step, itself."""
        return self.sub or (self,)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of a text form.

        Args:
            text: such as ``0F0``; white space around it is ignored.

        Raises:
            ValueError: the text is not an action.
        """
        text = text.strip()
        if several := SEVERAL.fullmatch(text):
            return _parse_several(text, *several.groups())
        single = SINGLE.fullmatch(text)
        if single is None:
            raise _not_an_action(text)
        return _parse_single(text, *single.groups())


def _parse_several(text: str, parts: str, kind: str) -> Action:
    sub = tuple(Action.parse(part) for part in parts.split(";"))
    if kind != Kind.OVERLAP_F_B.value or any(part.kind not in COMPUTES for part in sub):
        raise _not_an_action(text)
    return Action(-1, Kind.OVERLAP_F_B, None, sub)


def _parse_single(text: str, stage: str, name: str, microbatch: str) -> Action:
    if name not in Kind.__members__ or name == Kind.OVERLAP_F_B.value:
        raise _not_an_action(text)
    kind = Kind(name)
    if bool(microbatch) != (kind in COMPUTES or kind in MESSAGES):
        raise _not_an_action(text)
    return Action(int(stage), kind, int(microbatch) if microbatch else None)


def _not_an_action(text: str) -> ValueError:
    return ValueError(
        f"{text!r} is not an action: write stage, kind and micro-batch, such as 0F0, 2SEND_F1 or "
        f"(0F3;7B1)OVERLAP_F_B, or a stage and UNSHARD, RESHARD or REDUCE_GRAD"
    )
