"""The clocks of a trace: each host has its own, and one picture needs one.

A part says what clock its times are of, and how far the wall clock was ahead of that when it was
written. It also keeps when its rank entered and left the calls of groups on several hosts. No rank
leaves such a call before all have entered it: so each call bounds how far two clocks are apart,
from both sides, to about the time that the call took.
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
Meetings = dict[str, list[int]]  # of each call: when the last rank entered, and the first one left


def about_clock(calls: dict[str, list[Record]]) -> Contents:
    """What a part says of its clock; ``calls`` of each group on several hosts, by its team."""
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
    """Gives the times of all parts the clock of the first one."""
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
    """What is to be added to times of one clock to make them times of the placed ones, in ns."""
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
    """Of ranks with one clock."""
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
    """What the whole trace says of its clock: more parts may be added to it."""
    if not aligned:
        return {}
    clock = aligned[0]["otherData"].get("clock", {})
    return {"clock": clock, "meetings": meetings_of(aligned)}
