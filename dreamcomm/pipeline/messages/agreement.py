"""The end of a step: all ranks learn whether all parts of it went well.

Rank 0 of the group collects one message from every rank, and answers with a verdict. So gradients
are reduced on all ranks or on none, and no rank begins a step while another is in the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dreamcomm.pipeline.errors import Failure
from dreamcomm.pipeline.messages.channel import Channel
from dreamcomm.pipeline.messages.key import Key, Slot
from dreamcomm.pipeline.values import Number
from dreamcomm.ranks.errors import RankLeft, RankLost

__all__ = ["Part", "Verdict", "agree", "leave", "lost"]


@dataclass
class Part:
    """What a rank reports of a step.

    Attributes:
        failure: its own error, or that of which it heard first; None: none.
        count: of what a sum of losses goes over, such as tokens; None: not this rank's.
        losses: of a last stage; None: of another, or not wanted on all ranks.
        pipe: number of the pipeline whose losses these are.
        held: whether gradients of earlier steps are there; None: they have left none here.
    """

    failure: Failure | None = None
    count: Number | None = None
    losses: list[Any] | None = None
    pipe: int = 0
    held: bool | None = None


@dataclass
class Verdict:
    """What all ranks learn.

    Attributes:
        failure: of the lowest rank that failed, or None.
        count: the sum over all ranks, or None where none has one.
        losses: by the number of the pipeline.
        held: whether gradients of earlier steps are there on any rank; None: they have left none.
    """

    failure: Failure | None = None
    count: Number | None = None
    losses: dict[int, list[Any]] = field(default_factory=dict)
    held: bool | None = None


def agree(channel: Channel, step: int, mine: Part) -> Verdict:
    """Ends a step on all ranks. Collective.

    Raises:
        RankLost: a rank has ended. Rank 0 has told the others.
    """
    if channel.rank == 0:
        return _collect(channel, step, mine)
    channel.done(mine)
    verdict: Verdict = channel.receive(0, Key(step, Slot.VERDICT), despite_failures=True)
    return verdict


def leave(channel: Channel, step: int, mine: Part) -> None:
    """Ends a step that failed on this rank, without waiting for the others."""
    if channel.rank == 0:
        _tell(channel, step, Verdict(mine.failure))
    else:
        channel.done(mine)


def _collect(channel: Channel, step: int, mine: Part) -> Verdict:
    parts = [mine]
    try:
        for peer in range(1, channel.size):
            parts.append(channel.receive_done(peer))
    except RankLost as error:
        verdict = Verdict(lost(error))
        channel.tell_peers(lambda peer: channel.send(peer, Key(step, Slot.VERDICT), verdict))
        raise
    except RuntimeError as error:  # the group's timeout is over
        parts.append(Part(Failure(0, type(error).__name__, str(error))))
    if channel.failure is not None:
        parts.append(Part(channel.failure))
    verdict = _judged(parts)
    _tell(channel, step, verdict)
    return verdict


def _judged(parts: list[Part]) -> Verdict:
    failures = [one.failure for one in parts if one.failure is not None]
    counts = [one.count for one in parts if one.count is not None]
    held = [one.held for one in parts if one.held is not None]
    return Verdict(
        min(failures, key=lambda one: one.rank) if failures else None,
        sum(counts) if counts else None,
        {one.pipe: one.losses for one in parts if one.losses is not None},
        any(held) if held else None,
    )


def _tell(channel: Channel, step: int, verdict: Verdict) -> None:
    for peer in channel.peers:
        channel.send(peer, Key(step, Slot.VERDICT), verdict)


def lost(error: RankLost) -> Failure:
    """The failure that a rank's end is."""
    why = "its process has ended, and the group with it"
    if isinstance(error, RankLeft):
        why = f"it has left the group: {error.why}"
    return Failure(error.rank, "RankLost", f"{why}; start anew")
