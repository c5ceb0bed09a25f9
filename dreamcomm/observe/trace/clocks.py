"""Converts the times of a trace to one clock, since each host has its own.

A part names the clock of its times, and how far the wall clock was ahead of it when the part was
written. It also holds when its rank entered and left the calls of multi-node groups. No rank leaves
such a call before all have entered it. So each call bounds the offset of two clocks from both
sides, to about the time that the call took.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dreamcomm.observe.records import Record

__all__ = ["about_clock", "align", "joined_clocks"]

KEPT = 200  # calls of a group
Contents = dict[str, Any]
Meetings = dict[str, list[int]]  # for each call: when the last rank entered, and the first one left


def about_clock(calls: dict[str, list[Record]]) -> Contents:
    """A part's data on its clock; ``calls`` are those of each multi-node group, by its team."""
    monotonic = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    meetings = {
        f"{team[:8]}.{call.number}": [call.entered, call.ended]
        for team, all_of_team in calls.items()
        for call in [call for call in all_of_team if call.state == "done"][-KEPT:]
    }
    clock = {"id": clock_id(), "to_wall_ns": time.time_ns() - monotonic}
    return {"clock": clock, "meetings": meetings}


def clock_id() -> str:
    """Equal for processes that read one CLOCK_MONOTONIC."""
    found = []
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found.append(os.readlink("/proc/self/ns/time"))
    return " ".join(found)


def align(parts: list[Contents]) -> None:
    """Converts the times of all parts to the clock of the first one."""
    clocks: dict[str, list[Contents]] = {}
    for part in parts:
        clocks.setdefault(part["otherData"].get("clock", {}).get("id", ""), []).append(part)
    first, *others = clocks.values() or [[]]
    placed = list(first)
    for of_clock in others:
        shift = shift_of(of_clock, placed)
        for part in of_clock:
            move(part, shift)
        placed += of_clock


def shift_of(of_clock: list[Contents], placed: list[Contents]) -> int:
    """The ns to add to times of one clock to convert them to the clock of the placed parts."""
    own, there = (part[0]["otherData"].get("clock", {}) for part in (of_clock, placed))
    shift = int(own.get("to_wall_ns", 0)) - int(there.get("to_wall_ns", 0))
    ours, theirs = meetings_of(of_clock), meetings_of(placed)
    both = [(*ours[call], *theirs[call]) for call in ours.keys() & theirs.keys()]
    if not both:
        return shift
    least = max(entered_there - left for _, left, entered_there, _ in both)
    most = min(left_there - entered for entered, _, _, left_there in both)
    if least > most:  # one of the clocks runs faster
        return (least + most) // 2
    return min(max(shift, least), most)


def meetings_of(parts: list[Contents]) -> Meetings:
    """The calls of ranks with one clock."""
    found: Meetings = {}
    for part in parts:
        for call, (entered, left) in part["otherData"].get("meetings", {}).items():
            known = found.setdefault(call, [entered, left])
            known[:] = max(known[0], entered), min(known[1], left)
    return found


def move(part: Contents, shift: int) -> None:
    """Adds that many nanoseconds to the times of a part."""
    for event in part["traceEvents"]:
        if "ts" in event:
            event["ts"] += shift / 1000
    for meeting in part["otherData"].get("meetings", {}).values():
        meeting[:] = [when + shift for when in meeting]


def joined_clocks(aligned: list[Contents]) -> Contents:
    """The whole trace's data on its clock, since more parts may be added to it."""
    if not aligned:
        return {}
    clock = aligned[0]["otherData"].get("clock", {})
    return {"clock": clock, "meetings": meetings_of(aligned)}
