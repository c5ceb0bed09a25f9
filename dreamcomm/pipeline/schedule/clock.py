"""Runs the steps of a schedule on a clock, for ``simulate``.

A rank runs its steps in order. A step starts when the rank is free and what it needs is there. What
a step needs is a fact, such as "0F3 is done". A fact has a time from which it is known, and a step
that ends makes facts known. A rank whose next step needs an unknown fact waits for it.

Messages are matched by their order, as NCCL does it: a rank's n-th receive from a peer takes that
peer's n-th send to it. A send never waits. A receive waits for its message, and waits for ever if
another message is in its place.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from dreamcomm.pipeline.schedule.actions import Action, Kind
from dreamcomm.pipeline.schedule.schedule import Schedule
from dreamcomm.ranks.errors import Error

__all__ = ["Clock", "Costs", "Deadlock", "Number", "Span"]

Number: TypeAlias = float | Fraction

# What a send becomes at its receiver, whose stage is so much above the sender's.
SENDS = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}
# What a receive takes, and how much the sender's stage is above the receiver's.
RECEIVES = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}


class Span(NamedTuple):
    """A step and its time. Times may be simulated or measured, in any unit."""

    action: Action
    start: Number
    end: Number


class Deadlock(Error, RuntimeError):
    """Ranks that wait for ever.

    Attributes:
        waits: for each rank that waits, its step and what that waits for.
    """

    def __init__(self, waits: dict[int, str]) -> None:
        text = "; ".join(f"rank {rank} waits in {wait}" for rank, wait in sorted(waits.items()))
        super().__init__(f"the schedule deadlocks: {text}")
        self.waits = waits


class Costs(NamedTuple):
    """The time of each kind of step, and of a message after its send, as functions of the step."""

    forward: Callable[[Action], Number]
    backward_input: Callable[[Action], Number]
    backward_weight: Callable[[Action], Number]
    message: Callable[[Action], Number]

    def duration(self, action: Action) -> Number:
        """The time of a step."""
        if action.kind is Kind.F:
            return self.forward(action)
        if action.kind is Kind.I:
            return self.backward_input(action)
        if action.kind is Kind.W:
            return self.backward_weight(action)
        if action.kind is Kind.B:
            return self.backward_input(action) + self.backward_weight(action)
        return 0


class Clock:
    """A run of a schedule.

    Attributes:
        free: the time from which each rank is free.
        spans: each rank's steps so far.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.free: list[Number] = [0] * schedule.world
        self.spans: list[list[Span]] = [[] for _ in range(schedule.world)]
        self._schedule = schedule
        self._costs = costs
        self._explicit = schedule.has_messages
        self._known: dict[str, Number] = {}
        self._sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        self._received: defaultdict[tuple[int, int], int] = defaultdict(int)

    def run(self) -> None:
        """Runs all steps.

        Raises:
            Deadlock: some rank waits for ever.
        """
        rows = [self._schedule.parts(rank) for rank in range(self._schedule.world)]
        waiting: defaultdict[str, list[int]] = defaultdict(list)
        ready = deque(range(len(rows)))
        while ready:
            rank = ready.popleft()
            while len(self.spans[rank]) < len(rows[rank]):
                action = rows[rank][len(self.spans[rank])]
                needs = self._needs(rank, action)
                missing = [fact for fact in needs if fact not in self._known]
                if missing:
                    waiting[missing[0]].append(rank)
                    break
                for fact in self._execute(rank, action, needs):
                    ready.extend(waiting.pop(fact, ()))
        waits = {
            rank: f"{rows[rank][len(self.spans[rank])]} for {fact}"
            for fact, ranks in waiting.items()
            for rank in ranks
        }
        if waits:
            raise Deadlock(waits)

    def _execute(self, rank: int, action: Action, needs: list[str]) -> set[str]:
        """Runs a step whose needs are known. Returns the facts that it makes known."""
        start = max([self.free[rank], *(self._known[fact] for fact in needs)])
        end = start + self._costs.duration(action)
        self.free[rank] = end
        self.spans[rank].append(Span(action, start, end))
        made = self._made(rank, action)
        for fact, delay in made.items():
            self._known.setdefault(fact, end + delay)
        return set(made)

    def _needs(self, rank: int, action: Action) -> list[str]:
        stage, kind, _, _ = action
        if kind is Kind.F:
            return self._from_stage(stage - 1, rank, action)
        if kind in (Kind.B, Kind.I):
            return [_forward_done(stage, action), *self._from_stage(stage + 1, rank, action)]
        if kind is Kind.SEND_F:
            return [_forward_done(stage, action)]
        if kind in (Kind.W, Kind.SEND_B):
            return [_gradient_done(stage, action)]
        return [self._next_message(rank, action)] if kind in RECEIVES else []

    def _from_stage(self, source: int, rank: int, action: Action) -> list[str]:
        """What a compute needs of the stage next to its own."""
        if not 0 <= source < self._schedule.stages:
            return []
        forward = action.kind is Kind.F
        done = _forward_done(source, action) if forward else _gradient_done(source, action)
        if self._schedule.rank_of[source] == rank:
            return [done]
        if self._explicit:
            receive = Kind.RECV_F if forward else Kind.RECV_B
            return [str(Action(action.stage, receive, action.microbatch))]
        return [_arrival(done, rank)]

    def _next_message(self, rank: int, action: Action) -> str:
        """The message that a receive takes."""
        source = action.stage + RECEIVES[action.kind][1]
        if not 0 <= source < self._schedule.stages:
            return f"stage {source}, which does not exist"
        peer = self._schedule.rank_of[source]
        number = self._received[peer, rank]
        sent = self._sent[peer, rank]
        if number < len(sent) and sent[number] != action:
            return f"its message, while the next one from rank {peer} is that of {sent[number]}"
        return _message(peer, rank, number)

    def _made(self, rank: int, action: Action) -> dict[str, Number]:
        """The facts that a step makes known, and how much later than its end."""
        stage, kind, microbatch, _ = action
        if kind is Kind.F:
            return self._done(rank, _forward_done(stage, action), Kind.SEND_F, action)
        if kind in (Kind.B, Kind.I):
            return self._done(rank, _gradient_done(stage, action), Kind.SEND_B, action)
        if kind in RECEIVES:
            peer = self._schedule.rank_of[stage + RECEIVES[kind][1]]
            self._received[peer, rank] += 1
            return {str(action): 0}
        if kind not in SENDS:
            return {}
        receive, shift = SENDS[kind]
        peer = self._rank_of(stage + shift)
        self._sent[rank, peer].append(Action(stage + shift, receive, microbatch))
        number = len(self._sent[rank, peer]) - 1
        return {_message(rank, peer, number): self._costs.message(action)}

    def _done(self, rank: int, done: str, send: Kind, action: Action) -> dict[str, Number]:
        """That a compute is done, and that its result reaches the next rank if none sends it."""
        made: dict[str, Number] = {done: 0}
        peer = self._rank_of(action.stage + SENDS[send][1])
        if peer not in (rank, -1) and not self._explicit:
            delay = self._costs.message(Action(action.stage, send, action.microbatch))
            made[_arrival(done, peer)] = delay
        return made

    def _rank_of(self, stage: int) -> int:
        """The rank of a stage; -1 if there is no such stage."""
        return self._schedule.rank_of[stage] if 0 <= stage < self._schedule.stages else -1


def _forward_done(stage: int, action: Action) -> str:
    return f"{stage}F{action.microbatch}"


def _gradient_done(stage: int, action: Action) -> str:
    return f"{stage}I{action.microbatch} or {stage}B{action.microbatch}"


def _arrival(done: str, rank: int) -> str:
    return f"{done}, whose result goes to rank {rank}"


def _message(sender: int, receiver: int, number: int) -> str:
    return f"message {number} from rank {sender} to rank {receiver}"
