"""torch's own schedules pass the check, and their CSV files are read by both."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from dreamcomm.pipeline.schedule import (
    MESSAGES,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    check,
    make_schedule,
    read_csv,
    simulate,
    with_messages,
    write_csv,
)

Rows = tuple[tuple[Action | None, ...], ...]

# They have one stage a rank, and no list of actions that torch runs.
SINGLE = ("GPipe", "1F1B")

# Name, stages a rank, ranks and micro-batches.
CASES = [
    ("GPipe", 1, 4, 5),
    ("GPipe", 1, 4, 2),
    ("1F1B", 1, 4, 6),
    ("1F1B", 1, 4, 4),
    ("Interleaved1F1B", 2, 4, 8),
    ("Interleaved1F1B", 3, 2, 6),
    ("LoopedBFS", 2, 4, 5),
    ("InterleavedZeroBubble", 2, 4, 8),
    ("InterleavedZeroBubble", 1, 4, 8),
    ("ZBVZeroBubble", 2, 4, 9),
    ("ZBVZeroBubble", 2, 3, 2),
    ("DualPipeV", 2, 4, 10),
    ("DualPipeV", 2, 2, 4),
]


class RecordingStage(SimpleNamespace):
    """A stage without a module. It writes down what torch's runner asks of it."""

    def __init__(self, index: int, stages: int, ranks: int, rank: int) -> None:
        super().__init__(stage_index=index, num_stages=stages, group_size=ranks, group_rank=rank)
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod = None
        self.has_backward = True
        self.steps: list[str] = []

    def record(
        self, kind: str, microbatch: int, *, first: bool = True, last: bool = True
    ) -> list[Any]:
        if (first or not self.is_first) and (last or not self.is_last):
            self.steps.append(f"{self.stage_index}{kind}{microbatch}")
        return []

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        return self.record("RECV_F", microbatch, first=False)

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        return self.record("SEND_F", microbatch, last=False)

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        return self.record("RECV_B", microbatch, last=False)

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        return self.record("SEND_B", microbatch, first=False)

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.record("F", microbatch)

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.record("B", microbatch)

    def perform_reduce_grad(self, scale: int) -> None:
        self.steps.append(f"{self.stage_index}REDUCE_GRAD")


def made_by_torch(name: str, local: int, ranks: int, microbatches: int, rank: int = 0) -> Any:
    """torch's schedule, of recording stages."""
    stages = [RecordingStage(i * ranks + rank, local * ranks, ranks, rank) for i in range(local)]
    made: Callable[..., Any] = torch_schedules.get_schedule_class(name)
    return made(stages[0] if name in SINGLE else stages, microbatches)


def recorded(name: str, ranks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """What torch's runner of one stage a rank does on each rank."""
    rows = []
    for rank in range(ranks):
        schedule = made_by_torch(name, 1, ranks, microbatches, rank)
        schedule._initialize_stage = lambda *args: None
        schedule._maybe_compute_loss = lambda *args: None
        schedule._has_backward = True
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        rows.append(tuple(map(Action.parse, schedule._stage.steps)))
    return tuple(rows)


def actions_of(rows: dict[int, list[Any]]) -> Rows:
    """torch's actions as ours."""
    return tuple(
        tuple(None if action is None else Action.parse(str(action)) for action in rows[rank])
        for rank in sorted(rows)
    )


@cache
def orders(name: str, local: int, ranks: int, microbatches: int) -> tuple[Schedule, Schedule]:
    """torch's schedule as ours, without and with its messages."""
    if name in SINGLE:
        lowered: Rows = recorded(name, ranks, microbatches)
        computes: Rows = tuple(
            tuple(a for a in row if a is not None and a.kind not in MESSAGES) for row in lowered
        )
        rank_of = tuple(range(ranks))
    else:
        schedule = made_by_torch(name, local, ranks, microbatches)
        computes = actions_of(schedule.pipeline_order)
        lowered = actions_of(schedule.pipeline_order_with_comms)
        place = schedule.stage_index_to_group_rank
        rank_of = tuple(place[stage] for stage in range(local * ranks))
    stages = local * ranks
    return (
        Schedule(name, stages, microbatches, computes, rank_of),
        Schedule(name, stages, microbatches, lowered, rank_of),
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_schedules_are_accepted(case: tuple[str, int, int, int]) -> None:
    computes, lowered = orders(*case)
    check(computes)
    check(lowered)
    assert lowered.has_messages
    ours = with_messages(computes)
    check(ours)
    # torch receives as early as it can, so its ranks wait longer where a receive waits.
    length = simulate(computes).length
    assert simulate(lowered).length >= simulate(ours).length >= length
    if case[0] != "DualPipeV":  # of which two parts of one step wait for both their inputs
        assert simulate(ours).length == length


@pytest.mark.parametrize("case", [case for case in CASES if case[0] not in SINGLE], ids=str)
def test_files_of_torch_are_read(case: tuple[str, int, int, int], tmp_path: Path) -> None:
    theirs = made_by_torch(*case)
    for format, expected in zip(("compute_only", "compute_comms"), orders(*case), strict=True):
        theirs._dump_csv(tmp_path / "theirs.csv", format=format)
        read = read_csv(tmp_path / "theirs.csv")
        assert read.ranks == expected.ranks
        assert read.rank_of == expected.rank_of
        assert read.microbatches == case[3]
        check(read)
        write_csv(read, tmp_path / "ours.csv")
        assert (tmp_path / "ours.csv").read_bytes() == (tmp_path / "theirs.csv").read_bytes()


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved1f1b", "zb-h1"])
def test_our_files_are_read_by_torch(name: str, lowered: bool, tmp_path: Path) -> None:
    local = 2 if name == "interleaved1f1b" else 1
    schedule = make_schedule(name, 4, 4 * local, 6)
    written = with_messages(schedule) if lowered else schedule
    write_csv(written, tmp_path / "a.csv")
    theirs = made_by_torch("LoopedBFS", local, 4, 6)
    theirs._load_csv(tmp_path / "a.csv", format="compute_comms" if lowered else "compute_only")
    rows = theirs.pipeline_order_with_comms if lowered else theirs.pipeline_order
    for rank in range(4):
        read = [str(action) for action in rows[rank] if action is not None]
        assert read == [str(action) for action in written.actions(rank)]
    # torch's own dry run comes to the end too.
    if lowered:  # it knows no UNSHARD, which torch adds to the other kind of file
        assert theirs._simulate()


def test_an_order_of_torch_that_is_wrong() -> None:
    """torch 2.13 lists the last rank's forwards of 1F1B from micro-batch 1. Its runner is right."""
    rows = actions_of(made_by_torch("1F1B", 1, 4, 6)._get_pipeline_order())
    schedule = Schedule("1F1B", 4, 6, rows, (0, 1, 2, 3))
    if Action(3, Kind.F, 0) in rows[3]:
        check(schedule)
        return
    with pytest.raises(ScheduleError, match="3F6 is of a micro-batch outside 0 to 5"):
        check(schedule)
