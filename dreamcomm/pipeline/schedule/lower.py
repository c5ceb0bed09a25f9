"""Adds sends and receives to a schedule of computes.

A result is sent right after its compute. It is received just before the compute that needs it,
after all results that the same rank has sent earlier. So a rank receives the messages of another
one in the order of their sends, and no receive waits for a message that is sent later than the one
that is needed now. A schedule that runs without messages therefore runs with them, and takes no
longer. Only OVERLAP_F_B may: it starts when the inputs of both its parts are there.

Sends must not wait for their receives, as ``isend`` does not: neighbours often send to each other
at the same time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

from dreamcomm.pipeline.schedule.actions import Action, Kind
from dreamcomm.pipeline.schedule.schedule import Schedule

__all__ = ["with_messages"]

# The messages on one rank that it has not received yet, in the order of their sends, by sender.
Inbox = defaultdict[int, deque[Action]]


def with_messages(schedule: Schedule) -> Schedule:
    """The schedule with SEND_F, RECV_F, SEND_B and RECV_B, and without idle cells.

    Args:
        schedule: without messages. It should pass ``check``.

    Returns:
        A schedule in which stages next to each other on different ranks exchange messages.

    Raises:
        ValueError: the schedule has messages already, or a compute needs a result that no rank
            computes.
    """
    if schedule.has_messages:
        raise ValueError(f"with_messages: schedule {schedule.name} has messages already")
    inboxes: dict[int, Inbox] = {rank: defaultdict(deque) for rank in range(schedule.world)}
    for rank in range(schedule.world):
        for action in schedule.computes(rank):
            for send in _sends(schedule, action):
                receive = _receive_of(send)
                inboxes[schedule.rank_of[receive.stage]][rank].append(receive)
    ranks = tuple(_row(schedule, rank, inboxes[rank]) for rank in range(schedule.world))
    return replace(schedule, ranks=ranks)


def _row(schedule: Schedule, rank: int, inbox: Inbox) -> tuple[Action, ...]:
    row: list[Action] = []
    received: set[Action] = set()
    for action in schedule.actions(rank):
        for part in action.parts:
            needed = _needed(schedule, part)
            # It may be received already, for a compute that needed a later message.
            while needed is not None and needed not in received:
                row.append(_next(schedule, part, needed, inbox))
                received.add(row[-1])
        row.append(action)
        for part in action.parts:
            row += _sends(schedule, part)
    return tuple(row)


def _needed(schedule: Schedule, action: Action) -> Action | None:
    """The receive that a compute needs, if any."""
    stage, kind, microbatch, _ = action
    if kind is Kind.F and _crosses(schedule, stage, stage - 1):
        return Action(stage, Kind.RECV_F, microbatch)
    if kind in (Kind.B, Kind.I) and _crosses(schedule, stage, stage + 1):
        return Action(stage, Kind.RECV_B, microbatch)
    return None


def _next(schedule: Schedule, action: Action, needed: Action, inbox: Inbox) -> Action:
    """The next receive from the rank whose result a compute needs."""
    source = needed.stage - 1 if needed.kind is Kind.RECV_F else needed.stage + 1
    messages = inbox[schedule.rank_of[source]]
    if not messages:
        raise ValueError(
            f"with_messages: {action} needs {needed}, whose sender does not compute it: "
            f"see what `check` says of the schedule"
        )
    return messages.popleft()


def _sends(schedule: Schedule, action: Action) -> list[Action]:
    """The send after a compute, if its result goes to another rank."""
    stage, kind, microbatch, _ = action
    if kind is Kind.F and _crosses(schedule, stage, stage + 1):
        return [Action(stage, Kind.SEND_F, microbatch)]
    if kind in (Kind.B, Kind.I) and _crosses(schedule, stage, stage - 1):
        return [Action(stage, Kind.SEND_B, microbatch)]
    return []


def _receive_of(send: Action) -> Action:
    if send.kind is Kind.SEND_F:
        return Action(send.stage + 1, Kind.RECV_F, send.microbatch)
    return Action(send.stage - 1, Kind.RECV_B, send.microbatch)


def _crosses(schedule: Schedule, stage: int, other: int) -> bool:
    """Whether the other stage exists and is on another rank."""
    inside = 0 <= other < schedule.stages
    return inside and schedule.rank_of[stage] != schedule.rank_of[other]
