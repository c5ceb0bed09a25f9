"""The rules of a schedule's messages.

1. A message goes between stages next to each other, on different ranks.
2. A compute that needs a result of another rank has a receive before it, and one whose result goes
   to another rank has a send after it.
3. Every send has its receive, and every receive its send.
4. Each rank receives the messages of another one in the order in which that one sends them.
   Backends such as NCCL match messages by their order, so another order would mix them up.

Rules 2 and 3 say only that the steps exist; their order is a rule of ``check``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import zip_longest

from dreamcomm.pipeline.schedule.actions import MESSAGES, Action, Kind
from dreamcomm.pipeline.schedule.errors import fault
from dreamcomm.pipeline.schedule.schedule import Schedule

__all__ = ["check_messages", "partner", "receive_for", "send_for"]

# The other end of a message, and how much its stage is above this one's.
OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}


def partner(message: Action) -> Action:
    """The receive of a send, or the send of a receive."""
    kind, shift = OTHER_END[message.kind]
    return Action(message.stage + shift, kind, message.microbatch)


def receive_for(schedule: Schedule, compute: Action) -> Action | None:
    """The receive that a compute needs; None if what it needs is on its own rank."""
    kinds = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
    return _message(schedule, compute, kinds)


def send_for(schedule: Schedule, compute: Action) -> Action | None:
    """The send of a compute's result; None if no other rank needs it."""
    kinds = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}
    return _message(schedule, compute, kinds)


def _message(schedule: Schedule, compute: Action, kinds: Mapping[Kind, Kind]) -> Action | None:
    if compute.kind not in kinds:
        return None
    message = Action(compute.stage, kinds[compute.kind], compute.microbatch)
    other = partner(message).stage
    if not 0 <= other < schedule.stages:
        return None
    return message if schedule.rank_of[other] != schedule.rank_of[compute.stage] else None


def check_messages(schedule: Schedule, places: Mapping[Action, tuple[int, int]]) -> None:
    """Refuses a schedule whose messages are incomplete or in the wrong order.

    Args:
        schedule: with messages.
        places: where each compute and each message stands: rank and position in the row.

    Raises:
        ScheduleError: a rule is broken.
    """
    for action, (rank, _) in places.items():
        if action.kind in MESSAGES:
            _check_ends(schedule, places, rank, action)
            continue
        for message in (receive_for(schedule, action), send_for(schedule, action)):
            if message is not None and message not in places:
                raise fault(rank, message, f"is missing, while {action} is there", "add it")
    _check_order(schedule, places)


def _check_ends(
    schedule: Schedule, places: Mapping[Action, tuple[int, int]], rank: int, message: Action
) -> None:
    other = partner(message)
    if not 0 <= other.stage < schedule.stages:
        raise fault(rank, message, f"is for stage {other.stage}, which does not exist", "remove it")
    if schedule.rank_of[other.stage] == rank:
        raise fault(rank, message, f"is for stage {other.stage} of the same rank", "remove it")
    if other not in places:
        home = schedule.rank_of[other.stage]
        raise fault(rank, message, f"has no {other} on rank {home}", f"add {other} or remove it")


def _check_order(schedule: Schedule, places: Mapping[Action, tuple[int, int]]) -> None:
    sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for action, (rank, _) in places.items():
        if action.kind not in MESSAGES:
            continue
        other = partner(action)
        home = schedule.rank_of[other.stage]
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            sent[rank, home].append(other)
        else:
            received[home, rank].append(action)
    for (sender, receiver), messages in received.items():
        for expected, got in zip_longest(sent[sender, receiver], messages):
            if expected != got:
                problem = f"is received where rank {sender} sends the message of {expected}"
                remedy = f"receive in the order of rank {sender}'s sends"
                raise fault(receiver, got, problem, remedy)
