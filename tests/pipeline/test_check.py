"""The check refuses schedules that cannot run, and says why."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dreamcomm.pipeline.schedule import (
    MESSAGES,
    Action,
    Deadlock,
    Kind,
    Schedule,
    ScheduleError,
    check,
    gpipe,
    live_bound,
    make_schedule,
    one_f_one_b,
    simulate,
    with_messages,
    zero_bubble_h1,
)

SENDS = (Kind.SEND_F, Kind.SEND_B)


def schedule_of(*rows: str, stages: int = 2, rank_of: tuple[int, ...] = (0, 1)) -> Schedule:
    ranks = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    microbatches = 1 + max(a.microbatch or 0 for row in ranks for a in row)
    return Schedule("written", stages, microbatches, ranks, rank_of)


def test_forward_only() -> None:
    schedule = schedule_of("0F0 0F1", "1F0 1F1")
    check(schedule, max_live=0)
    check(with_messages(schedule))
    assert live_bound(schedule, 0) == 0
    assert simulate(schedule).live_peak == (0, 0)


def test_what_other_data_parallelism_adds_is_ignored() -> None:
    check(schedule_of("0UNSHARD 0F0 0B0 0RESHARD", "1F0 (1B0)OVERLAP_F_B 1REDUCE_GRAD"))


@pytest.mark.parametrize(
    ("rows", "rank", "action", "message"),
    [
        (("0F0 0B0", "1B0"), 1, "1F0", "is missing: add it"),
        (("0F0 0B0", "1F0"), 1, "1B0", "add it, or 1I0 and 1W0"),
        (("0F0 0B0", "1F0 1I0"), 1, "1W0", "is missing, while 1I0"),
        (("0F0 0B0", "1F0 1W0"), 1, "1I0", "is missing, while 1W0"),
        (("0F0 0B0", "1F0 1B0 1W0"), 1, "1W0", "is a part of 1B0"),
        (("0F0 0B0", "1F0 1F0 1B0"), 1, "1F0", "is there twice: remove"),
        (("0F0 0B0 1B0", "1F0"), 0, "1B0", "move it to rank 1"),
        (("0F0 0B0 2F0", "1F0 1B0"), 0, "2F0", "outside 0 to 1"),
        (("0B0 0F0", "1F0 1B0"), 0, "0B0", "move 0F0 before it"),
        (("0F0 0B0", "1F0 1W0 1I0"), 1, "1W0", "move 1I0 before it"),
    ],
)
def test_computes(rows: tuple[str, str], rank: int, action: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        check(schedule_of(*rows))
    assert (caught.value.rank, str(caught.value.action)) == (rank, action)
    stage, microbatch = int(action[0]), 0
    where = f"rank {rank}, stage {stage}, micro-batch {microbatch}: {action} "
    assert str(caught.value).startswith(where)


RANK_0 = "0F0 0SEND_F0 0RECV_B0 0B0"
RANK_1 = "1RECV_F0 1F0 1B0 1SEND_B0"


@pytest.mark.parametrize(
    ("rows", "rank", "action", "message"),
    [
        (("0F0 0RECV_B0 0B0", RANK_1), 0, "0SEND_F0", "is missing, while 0F0 is there"),
        ((RANK_0, "1F0 1B0 1SEND_B0"), 1, "1F0", "needs 1RECV_F0, which is missing"),
        (("0SEND_F0 0F0 0RECV_B0 0B0", RANK_1), 0, "0SEND_F0", "move 0F0 before it"),
        ((RANK_0, "1F0 1RECV_F0 1B0 1SEND_B0"), 1, "1F0", "move 1RECV_F0 before it"),
        ((RANK_0 + " 0SEND_B0", RANK_1), 0, "0SEND_B0", "stage -1, which does not exist"),
        (
            ("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1F1 1RECV_F0 1F0"),
            1,
            "1RECV_F1",
            "receive in the order of rank 0's sends",
        ),
        (("0F0 0RECV_B0 0SEND_F0 0B0", RANK_1), 0, "0RECV_B0", "ranks wait: rank 0 in 0RECV_B0"),
    ],
)
def test_messages(rows: tuple[str, str], rank: int, action: str, message: str) -> None:
    check(schedule_of(RANK_0, RANK_1))
    with pytest.raises(ScheduleError, match=message) as caught:
        check(schedule_of(*rows))
    assert (caught.value.rank, str(caught.value.action)) == (rank, action)


def test_a_message_within_a_rank() -> None:
    schedule = schedule_of("0F0 0SEND_F0 1RECV_F0 1F0", rank_of=(0, 0))
    with pytest.raises(ScheduleError, match="stage 1 of the same rank: remove it"):
        check(schedule)


def test_ranks_that_wait_for_each_other() -> None:
    schedule = schedule_of("0F0 2F0 0F1 2F1", "1F1 1F0", stages=3, rank_of=(0, 1, 0))
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert "rank 0 in 2F0 for 1F0 of rank 1" in str(caught.value)
    assert "rank 1 in 1F1 for 0F1 of rank 0" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 0}, "at least one"),
        ({"microbatches": 0}, "at least one"),
        ({"rank_of": (0,)}, "give the rank of each stage"),
        ({"rank_of": (0, 2)}, "rank 2, which has no row"),
        ({"microbatches": 1}, "outside 0 to 0: remove it or add micro-batches"),
        ({"microbatches": 3}, "0F2 is missing"),
    ],
)
def test_sizes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(replace(gpipe(2, 2), **change))


def test_live_activations() -> None:
    check(zero_bubble_h1(4, 8), max_live=[4, 3, 2, 1])
    with pytest.raises(ScheduleError, match="0F4 makes 5 live activations of the stage, more than"):
        check(gpipe(4, 8), max_live=4)
    with pytest.raises(ScheduleError, match="rank 3, stage 3, micro-batch 1: 3F1"):
        check(gpipe(4, 8), max_live=[8, 8, 8, 1])
    with pytest.raises(ValueError, match="3 limits, for 4 stages"):
        check(one_f_one_b(4, 8), max_live=[4, 3, 2])


def valid() -> Iterator[Schedule]:
    for name, v in (("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("zb-h1", 1), ("interleaved1f1b", 2)):
        for k, m in ((2, 1), (2, 3), (3, 2), (4, 3)):
            schedule = make_schedule(name, k, v * k, m)
            yield schedule
            yield with_messages(schedule)


def needs(later: Action, earlier: Action) -> bool:
    """Whether one step of a row plainly needs another: same micro-batch, one behind the other."""
    if later.microbatch != earlier.microbatch:
        return False
    pairs = {"FB", "FI", "IW"}
    same_stage = later.stage == earlier.stage
    if same_stage and earlier.kind in (Kind.RECV_F, Kind.RECV_B):
        return later.kind in ((Kind.F,) if earlier.kind is Kind.RECV_F else (Kind.B, Kind.I))
    if same_stage and later.kind in SENDS:
        return earlier.kind in ((Kind.F,) if later.kind is Kind.SEND_F else (Kind.B, Kind.I))
    if earlier.kind is later.kind is Kind.F:
        return earlier.stage < later.stage
    return same_stage and earlier.kind.value + later.kind.value in pairs


def swapped(row: list[Action], i: int, j: int) -> list[Action]:
    row = list(row)
    row[i], row[j] = row[j], row[i]
    return row


def mutated_rows(row: list[Action], chance: random.Random) -> Iterator[tuple[str, list[Action]]]:
    for i in range(len(row)):
        yield "drop", row[:i] + row[i + 1 :]
        other = chance.randrange(len(row) + 1)
        yield "duplicate", [*row[:other], row[i], *row[other:]]
    for i in range(len(row)):
        for j in range(i + 1, len(row)):
            if needs(row[j], row[i]):
                yield "swap of a dependent pair", swapped(row, i, j)
    messages = [i for i, action in enumerate(row) if action.kind in MESSAGES]
    for i, j in pairwise(messages):
        kinds = (row[i].kind in SENDS) + (row[j].kind in SENDS)
        name = "swap of a send and a receive" if kinds == 1 else "swap of two sends or receives"
        yield name, swapped(row, i, j)
    for _ in range(4):
        i, j = chance.randrange(len(row)), chance.randrange(len(row))
        if i != j:
            yield "swap of any pair", swapped(row, i, j)


def mutants() -> Iterator[tuple[str, Schedule, Schedule]]:
    chance = random.Random(8)
    for schedule in valid():
        for rank in range(schedule.world):
            for kind, row in mutated_rows(list(schedule.actions(rank)), chance):
                ranks = list(schedule.ranks)
                ranks[rank] = tuple(row)
                yield kind, schedule, replace(schedule, ranks=tuple(ranks))


def runs_as(mutant: Schedule, schedule: Schedule) -> bool:
    """Whether a mutant does the same work, by the simulator, which knows nothing of the check."""
    for rank in range(schedule.world):
        if Counter(mutant.parts(rank)) != Counter(schedule.parts(rank)):
            return False
    try:
        simulate(mutant)
    except Deadlock:
        return False
    return True


def test_mutants_are_refused() -> None:
    """Every mutant that is not equivalent is refused, and every equivalent one is accepted."""
    refused: Counter[str] = Counter()
    equivalent: Counter[str] = Counter()
    for kind, schedule, mutant in mutants():
        if runs_as(mutant, schedule):
            check(mutant)
            equivalent[kind] += 1
            continue
        with pytest.raises(ScheduleError):
            check(mutant)
        refused[kind] += 1
    print(f"refused: {dict(refused)}, equivalent: {dict(equivalent)}")
    assert refused["drop"] >= 300
    assert refused["duplicate"] >= 300
    assert refused["swap of a dependent pair"] >= 300
    assert refused["swap of two sends or receives"] >= 50
    assert refused["swap of a send and a receive"] >= 50
    assert set(equivalent) <= {
        "swap of two sends or receives",
        "swap of a send and a receive",
        "swap of any pair",
    }
    assert 10 * sum(equivalent.values()) < sum(refused.values())
