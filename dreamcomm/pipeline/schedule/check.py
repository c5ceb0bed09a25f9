"""Says whether a schedule can run, and if not, which step is wrong and what to do.

The rules, in the order in which they are checked:

1. Every stage is on one rank, and every step of it too.
2. Every stage has each micro-batch once: F, and B or both of I and W. No stage has a backward in a
   schedule that only goes forward.
3. Every rank's row has a step after those that it needs from the same rank.
4. Messages, if the schedule has any: see ``messages``.
5. Ranks that run their rows in order, and wait for each other, all reach the end.
6. No stage keeps more activations than the caller allows.

UNSHARD, RESHARD and REDUCE_GRAD are ignored. OVERLAP_F_B is taken as its parts, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dreamcomm.pipeline.schedule.actions import COMPUTES, MESSAGES, Action, Kind
from dreamcomm.pipeline.schedule.errors import ScheduleError, fault
from dreamcomm.pipeline.schedule.messages import check_messages, partner, receive_for
from dreamcomm.pipeline.schedule.schedule import Schedule

__all__ = ["check", "live_bound"]

# Where each step stands: its rank and its position in that rank's row.
Places = dict[Action, tuple[int, int]]


def check(schedule: Schedule, *, max_live: int | Sequence[int] | None = None) -> None:
    """Refuses a schedule that cannot run.

    Args:
        schedule: with or without messages.
        max_live: the most activations that a stage may keep, or a number for each stage, as
            ``live_bound`` counts them. None for no limit.

    Raises:
        ScheduleError: the schedule cannot run, or a stage keeps more activations than allowed.
        ValueError: ``max_live`` does not have a number for each stage.
    """
    _check_placement(schedule)
    places = _places(schedule)
    _check_complete(schedule, places)
    explicit = schedule.has_messages
    needs = {action: _needs(schedule, explicit, action, places) for action in places}
    _check_rows(places, needs)
    if explicit:
        check_messages(schedule, places)
    _check_progress(schedule, places, needs)
    if max_live is not None:
        _check_live(schedule, max_live)


def live_bound(schedule: Schedule, stage: int) -> int:
    """The most micro-batches of which a stage keeps activations at once.

    A micro-batch counts from its forward to its backward for inputs. Without a backward nothing is
    kept.

    Args:
        schedule: one that passes ``check``.
        stage: which one.
    """
    if schedule.forward_only:
        return 0
    return max((live for _, live in _live(schedule, stage)), default=0)


def _live(schedule: Schedule, stage: int) -> Iterator[tuple[Action, int]]:
    """The steps of a stage, and of how many micro-batches it keeps activations after each."""
    live = 0
    for action in schedule.computes(schedule.rank_of[stage]):
        if action.stage == stage:
            live += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.I))
            yield action, live


def _check_placement(schedule: Schedule) -> None:
    """Rule 1, for the schedule as a whole."""
    if schedule.stages < 1 or schedule.microbatches < 1:
        raise ScheduleError(
            f"{schedule.stages} stages, {schedule.microbatches} micro-batches: "
            f"a schedule needs at least one of each"
        )
    if len(schedule.rank_of) != schedule.stages:
        raise ScheduleError(
            f"rank_of has {len(schedule.rank_of)} entries for {schedule.stages} stages: "
            f"give the rank of each stage"
        )
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < schedule.world:
            raise ScheduleError(
                f"stage {stage} is on rank {rank}, which has no row: "
                f"there are rows for ranks 0 to {schedule.world - 1}"
            )


def _places(schedule: Schedule) -> Places:
    """Where each step stands. Each may stand once, on the rank of its stage."""
    places: Places = {}
    for rank in range(schedule.world):
        for position, action in enumerate(schedule.parts(rank)):
            if action.kind not in COMPUTES and action.kind not in MESSAGES:
                continue
            _check_place(schedule, rank, action)
            if action in places:
                raise fault(rank, action, "is there twice", "remove one of the two")
            places[action] = rank, position
    return places


def _check_place(schedule: Schedule, rank: int, action: Action) -> None:
    stage, _, microbatch, _ = action
    if not 0 <= stage < schedule.stages:
        problem = f"is of a stage outside 0 to {schedule.stages - 1}"
        raise fault(rank, action, problem, "remove it or add stages")
    if microbatch is None or not 0 <= microbatch < schedule.microbatches:
        problem = f"is of a micro-batch outside 0 to {schedule.microbatches - 1}"
        raise fault(rank, action, problem, "remove it or add micro-batches")
    if schedule.rank_of[stage] != rank:
        home = schedule.rank_of[stage]
        raise fault(rank, action, f"is of a stage on rank {home}", f"move it to rank {home}")


def _check_complete(schedule: Schedule, places: Places) -> None:
    """Rule 2."""
    forward_only = schedule.forward_only
    for stage, rank in enumerate(schedule.rank_of):
        for m in range(schedule.microbatches):
            forward, backward, inputs, weights = (
                Action(stage, kind, m) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            )
            if forward not in places:
                raise fault(rank, forward, "is missing", "add it to the rank's row")
            if forward_only:
                continue
            if backward in places:
                for half in (inputs, weights):
                    if half in places:
                        raise fault(rank, half, f"is a part of {backward}", "remove one of the two")
            elif inputs not in places and weights not in places:
                raise fault(rank, backward, "is missing", f"add it, or {inputs} and {weights}")
            for half, other in ((inputs, weights), (weights, inputs)):
                if half not in places and other in places:
                    raise fault(rank, half, f"is missing, while {other} is there", "add it")


def _needs(schedule: Schedule, explicit: bool, action: Action, places: Places) -> list[Action]:
    """The steps that must be done before this one. ``explicit``: the schedule has messages."""
    stage, kind, m, _ = action
    forward = Action(stage, Kind.F, m)
    if kind is Kind.SEND_F:
        return [forward]
    if kind is Kind.SEND_B:
        return [_gradient(stage, m, places)]
    if kind in MESSAGES:
        sender = partner(action)
        return [sender] if sender in places else []
    if kind is Kind.W:
        return [Action(stage, Kind.I, m)]
    needs = [] if kind is Kind.F else [forward]
    source = stage - 1 if kind is Kind.F else stage + 1
    if 0 <= source < schedule.stages:
        receive = receive_for(schedule, action) if explicit else None
        made = Action(source, Kind.F, m) if kind is Kind.F else _gradient(source, m, places)
        needs.append(receive or made)
    return needs


def _gradient(stage: int, microbatch: int | None, places: Places) -> Action:
    """The step that computes the gradient of a stage's input."""
    full = Action(stage, Kind.B, microbatch)
    return full if full in places else Action(stage, Kind.I, microbatch)


def _check_rows(places: Places, needs: dict[Action, list[Action]]) -> None:
    """Rule 3, and that what a step needs exists."""
    for action, (rank, position) in places.items():
        for needed in needs[action]:
            if needed not in places:
                raise fault(rank, action, f"needs {needed}, which is missing", f"add {needed}")
            other_rank, other = places[needed]
            if other_rank == rank and other > position:
                problem = f"needs {needed}, which is later in the rank's row"
                raise fault(rank, action, problem, f"move {needed} before it")


def _check_progress(schedule: Schedule, places: Places, needs: dict[Action, list[Action]]) -> None:
    """Rule 5: every rank runs as far as it can, until none can go on."""
    rows = [[a for a in schedule.parts(r) if a in places] for r in range(schedule.world)]
    reached = [0] * schedule.world
    done: set[Action] = set()
    going = True
    while going:
        going = False
        for rank, row in enumerate(rows):
            while reached[rank] < len(row) and done.issuperset(needs[row[reached[rank]]]):
                done.add(row[reached[rank]])
                reached[rank] += 1
                going = True
    stuck = {r: row[reached[r]] for r, row in enumerate(rows) if reached[r] < len(row)}
    if stuck:
        waits = []
        for rank, action in stuck.items():
            missing = next(needed for needed in needs[action] if needed not in done)
            waits.append(f"rank {rank} in {action} for {missing} of rank {places[missing][0]}")
        rank, action = next(iter(stuck.items()))
        remedy = "move one of these steps behind what another rank waits for"
        raise fault(rank, action, f"never starts, ranks wait: {', '.join(waits)}", remedy)


def _check_live(schedule: Schedule, max_live: int | Sequence[int]) -> None:
    """Rule 6."""
    limits = [max_live] * schedule.stages if isinstance(max_live, int) else list(max_live)
    if len(limits) != schedule.stages:
        raise ValueError(f"check: max_live has {len(limits)} limits, for {schedule.stages} stages")
    if schedule.forward_only:
        return
    for stage, limit in enumerate(limits):
        for action, live in _live(schedule, stage):
            if live > limit:
                problem = f"makes {live} live activations of the stage, more than {limit}"
                remedy = "move a backward of the stage before it"
                raise fault(schedule.rank_of[stage], action, problem, remedy)
