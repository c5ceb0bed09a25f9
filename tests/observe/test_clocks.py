"""Traces of hosts that have clocks of their own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import dreamcomm
from dreamcomm.observe.trace.clocks import align

Contents = dict[str, Any]
BOOTED = 10_000_000_000  # nanoseconds that the second host's clock is behind


def part(rank: int, clock: str, wall: int, calls: dict[str, tuple[int, int]]) -> Contents:
    events = [
        {"ph": "X", "name": "all_reduce", "pid": rank, "tid": 0, "ts": begin / 1000, "dur": 1.0}
        for begin, _ in calls.values()
    ]
    return {
        "traceEvents": [{"ph": "M", "name": "process_name", "pid": rank}, *events],
        "otherData": {
            "trace": "run",
            "dropped": {},
            "clock": {"id": clock, "to_wall_ns": wall},
            "meetings": {call: list(both) for call, both in calls.items()},
        },
    }


def times_of(contents: Contents, rank: int) -> list[float]:
    return [e["ts"] * 1000 for e in contents["traceEvents"] if e["pid"] == rank and "ts" in e]


HERE = {"a.1": (1000, 5000), "a.2": (7000, 9000)}
# In truth the second host's ranks enter 500 later, and leave 500 later.
THERE = {call: (begin + 500 - BOOTED, end + 500 - BOOTED) for call, (begin, end) in HERE.items()}


@pytest.mark.parametrize(
    ("wall_is_off", "off"),
    [(0, 0), (1000, 1000), (-900, -900), (10**9, 1500), (-(10**9), -2500)],
)
def test_wall_clocks_are_believed_as_far_as_calls_allow(wall_is_off: int, off: int) -> None:
    parts = [part(0, "A", 0, HERE), part(1, "B", BOOTED + wall_is_off, THERE)]
    align(parts)
    assert times_of(parts[0], 0) == pytest.approx([1000, 7000])
    assert times_of(parts[1], 1) == pytest.approx([1500 + off, 7500 + off])


def test_ranks_of_one_clock_are_not_moved() -> None:
    parts = [part(0, "A", 0, HERE), part(1, "A", 10**12, {"a.1": (1200, 4900)})]
    before = copy.deepcopy(parts)
    align(parts)
    assert parts == before


def test_parts_without_a_clock_are_left_as_they_are() -> None:
    parts = [part(0, "A", 0, HERE), part(1, "A", 0, HERE)]
    for one in parts:
        del one["otherData"]["clock"], one["otherData"]["meetings"]
    before = copy.deepcopy(parts)
    align(parts)
    assert parts == before


def test_a_part_may_be_added_later_on_another_clock(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    for rank, (clock, wall, calls) in enumerate(
        [("A", 0, HERE), ("B", BOOTED, THERE), ("B", BOOTED, THERE)]
    ):
        file = tmp_path / f"part{rank}"
        file.write_text(json.dumps(part(rank, clock, wall, calls)))
        dreamcomm.merge_traces([file], target)
    found = json.loads(target.read_text())
    assert times_of(found, 0) == pytest.approx([1000, 7000])
    assert times_of(found, 1) == times_of(found, 2) == pytest.approx([1500, 7500])
    assert found["otherData"]["clock"]["id"] == "A"
    assert found["otherData"]["meetings"] == {"a.1": [1500, 5000], "a.2": [7500, 9000]}
