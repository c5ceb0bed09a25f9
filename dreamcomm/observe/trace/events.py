"""One rank's records as events of a Chrome trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dreamcomm.observe.records import Record, size_of_call, world_rank
from dreamcomm.observe.trace.clocks import about_clock

if TYPE_CHECKING:
    from dreamcomm._C import Recorder

__all__ = ["part_of"]

PHASES = ("wait", "copy in", "reduce", "copy out")
BETWEEN = ("between hosts",)
Event = dict[str, Any]
Span = tuple[int, str, int, int]


def part_of(recorders: list[Recorder], name: str) -> Event:
    """One rank's events, and for each group the number that was dropped because of the limit."""
    events: list[Event] = []
    dropped: dict[str, int] = {}
    calls: dict[str, list[Record]] = {}
    lane = 0
    for one in recorders:
        for part, title, phases in lanes_of(one):
            found = part.trace_records()
            if found is None:
                continue
            collectives, messages, spans, *counts = found
            lost = sum(counts) - len(collectives) - len(messages) - len(spans)
            if lost > 0:
                who = f"rank {world_rank(one, one.rank)}, group {one.group}"
                dropped[who] = dropped.get(who, 0) + lost
            records = list(map(Record.of, collectives))
            events += events_of(part, lane, title, phases, records, spans)
            events += message_events(part, lane, list(map(Record.of, messages)))
            lane += len(phases) + 1
            if part.hosts:
                calls[part.team] = records
    other = {"trace": name, "dropped": dropped, **about_clock(calls)}
    return {"traceEvents": events, "otherData": other}


def lanes_of(recorder: Recorder) -> Iterator[tuple[Recorder, str, tuple[str, ...]]]:
    """The group's calls with their steps; in a multi-node group with the waits of the calls.

    Then the calls' parts within this rank's host follow.
    """
    parts = recorder.parts
    if parts is None:
        yield recorder, recorder.group, PHASES
    else:
        yield recorder, recorder.group, BETWEEN
        yield parts, f"{recorder.group}, within the host", PHASES


def events_of(
    recorder: Recorder,
    lane: int,
    title: str,
    phases: tuple[str, ...],
    records: list[Record],
    spans: list[Span],
) -> Iterator[Event]:
    """The events of collectives: the lanes' names, the calls, and the steps in them."""
    pid = world_rank(recorder, recorder.rank)
    yield named("process_name", pid, 0, f"rank {pid}")
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for offset, name in enumerate(("calls", *phases)):
        yield named("thread_name", pid, lane + offset, f"{title}: {name}")
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": pid,
            "tid": lane + offset,
            "args": {"sort_index": lane + offset},
        }
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    for record in records:
        yield lasting(record.operation, pid, lane, record.entered, record.ended or now) | {
            "args": about(recorder, record)
        }
    for call, phase, begin, end in spans:
        made = lasting(phase, pid, lane + 1 + phases.index(phase), begin, end)
        yield made | {"args": {"call": call}}


def about(recorder: Recorder, record: Record) -> Event:
    """The details that a click on the call shows."""
    told: Event = {
        "call": record.number,
        "bytes": size_of_call(record.operation, record.nbytes, recorder.size),
        "dtype": record.dtype,
        "state": record.state,
    }
    if record.op != "none":
        told["op"] = record.op
    if record.algorithm:
        told["algorithm"] = record.algorithm
    if record.arrived > record.entered:
        told["waited_us"] = (record.arrived - record.entered) / 1000
        told["for_rank"] = world_rank(recorder, record.peer)
    return told


def message_events(recorder: Recorder, lane: int, records: list[Record]) -> Iterator[Event]:
    """Messages as pairs of events on their own track, because they overlap."""
    pid = world_rank(recorder, recorder.rank)
    for record in records:
        way = "to" if record.operation == "send" else "from"
        other = "any rank" if record.peer < 0 else f"rank {world_rank(recorder, record.peer)}"
        both: Event = {
            "name": f"{record.operation} {way} {other}",
            "cat": f"{recorder.group}: messages",
            "id": f"{pid}.{lane}.{record.operation}.{record.peer}.{record.number}",
            "pid": pid,
            "tid": lane,
        }
        yield both | {
            "ph": "b",
            "ts": record.entered / 1000,
            "args": {"bytes": record.nbytes, "state": record.state},
        }
        yield both | {"ph": "e", "ts": record.ended / 1000}


def named(what: str, pid: int, tid: int, name: str) -> Event:
    """A title of a process or lane."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def lasting(name: str, pid: int, tid: int, begin: int, end: int) -> Event:
    """An event from begin to end, which are given in nanoseconds and written in microseconds."""
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": begin / 1000,
        "dur": max(end - begin, 0) / 1000,
    }
