"""A timeline of all ranks in one file, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each rank is a process of the picture. Each of its groups has a lane for the calls and one for
each thing that is done in them (wait for peers, copy in, reduce, copy out), and a track for
messages.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dreamcomm.records import Record, size_of_call, world_rank

if TYPE_CHECKING:
    from dreamcomm._C import Recorder

__all__ = ["Trace", "merge_traces", "trace"]

PHASES = ("wait", "copy in", "reduce", "copy out")
Event = dict[str, Any]


def trace(
    path: str | os.PathLike[str],
    *,
    calls: int = 100_000,
    spans: int = 400_000,
    patience: float = 10.0,
) -> Trace:
    """Begins a timeline of all groups of this process, also of those that come later.

    It is written by ``stop()``, or at the end of a ``with`` block. Every rank that is to be in it
    calls this with the same path; rank 0 of the job waits for the others' parts, merges them and
    writes the file. Nothing is communicated between the ranks for it. ::

        with dreamcomm.trace("run.json"):
            train()

    Args:
        path: of the file; parts of the ranks lie beside it until they are merged.
        calls: of these, the last are kept, in each group.
        spans: likewise for the waits, copies and reductions in the calls; 50 bytes each.
        patience: seconds that rank 0 waits for the parts of the others.

    Raises:
        ValueError: a number below 1, or a folder that is not there.
        RuntimeError: a trace of this process runs already.
    """
    from dreamcomm._compat import check_build

    check_build()
    if calls < 1 or spans < 1:
        raise ValueError(f"dreamcomm.trace: expected numbers from 1 on, got {calls=}, {spans=}")
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise ValueError(f"dreamcomm.trace: there is no folder {target.absolute().parent}")
    return Trace(target, calls, spans, patience)


class Trace:
    """A trace that runs; see :func:`trace`."""

    def __init__(self, path: Path, calls: int, spans: int, patience: float) -> None:
        from dreamcomm import _C

        _C.start_trace(calls, spans)
        self._path = path
        self._patience = patience
        self._runs = True

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the trace and writes this rank's part; on rank 0 of the job the file.

        A second call does nothing.

        Raises:
            OSError: the file cannot be written.
        """
        from dreamcomm import _C

        if not self._runs:
            return
        self._runs = False
        recorders = _C.stop_trace()
        if not recorders:
            logging.getLogger("dreamcomm").warning(
                "no group of dreamcomm was there while the trace ran: %s is not written", self._path
            )
            return
        whole = max(recorders, key=lambda one: one.size)  # the job's own group, if any is
        own = part_path(self._path, whole.team, world_rank(whole, whole.rank))
        write_json(own, part_of(recorders))
        if whole.rank != 0:
            return
        ranks = [world_rank(whole, rank) for rank in range(whole.size)]
        parts = [part_path(self._path, whole.team, rank) for rank in ranks]
        missing = [part for part in parts if not appears(part, time.monotonic() + self._patience)]
        if missing:
            logging.getLogger("dreamcomm").warning(
                "the trace %s lacks ranks, as these parts did not appear within %g s: %s; once "
                "they do, dreamcomm.merge_traces() merges them into it",
                self._path,
                self._patience,
                ", ".join(map(str, missing)),
            )
        merge_traces([part for part in parts if part not in missing], self._path)


def part_path(path: Path, team: str, rank: int) -> Path:
    """Where a rank leaves its part; the team keeps jobs and runs apart."""
    return path.with_name(f"{path.name}.{team[:8]}.rank{rank}")


def appears(path: Path, deadline: float) -> bool:
    """Whether the file is there before the deadline of time.monotonic()."""
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def write_json(path: Path, found: Event) -> None:
    """Whole or not at all: others wait for the name to appear."""
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        json.dump(found, file, separators=(",", ":"))
    new.rename(path)


def merge_traces(parts: list[Path], path: str | os.PathLike[str]) -> None:
    """Writes the ranks' parts into one trace and removes them.

    Args:
        parts: files that ranks have left beside a trace.
        path: the trace; events that it has already stay in it.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a file is no trace.
    """
    target = Path(path)
    events: list[Event] = []
    dropped: dict[str, int] = {}
    for part in parts:
        found = json.loads(part.read_text())
        if "traceEvents" not in found:
            raise ValueError(f"{part} is no part of a trace")
        events += found["traceEvents"]
        dropped.update(found["otherData"]["dropped"])
    events.sort(key=lambda event: event.get("ts", -1))
    write_json(
        target,
        {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"dropped": dropped}},
    )
    for part in parts:
        part.unlink()


def part_of(recorders: list[Recorder]) -> Event:
    """One rank's events, and how many of each group's were dropped as there were too many."""
    events: list[Event] = []
    dropped: dict[str, int] = {}
    lane = 0
    for one in recorders:
        found = one.trace_records()
        if found is None:
            continue
        collectives, messages, spans, *counts = found
        kept = (len(collectives), len(messages), len(spans))
        lost = sum(counts) - sum(kept)
        if lost > 0:
            dropped[f"rank {world_rank(one, one.rank)}, group {one.group}"] = lost
        events += events_of(one, lane, [Record.of(f) for f in collectives], spans)
        events += message_events(one, lane, [Record.of(f) for f in messages])
        lane += len(PHASES) + 1
    return {"traceEvents": events, "otherData": {"dropped": dropped}}


def events_of(
    recorder: Recorder, lane: int, records: list[Record], spans: list[tuple[int, str, int, int]]
) -> Iterator[Event]:
    """Of the collectives of one group: the lanes' names, the calls, and what was done in them."""
    pid = world_rank(recorder, recorder.rank)
    yield named("process_name", pid, 0, f"rank {pid}")
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for offset, name in enumerate(("calls", *PHASES)):
        yield named("thread_name", pid, lane + offset, f"{recorder.group}: {name}")
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
        made = lasting(phase, pid, lane + 1 + PHASES.index(phase), begin, end)
        yield made | {"args": {"call": call}}


def about(recorder: Recorder, record: Record) -> Event:
    """What a click on the call shows."""
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
    """Messages overlap: each is a pair of events on a track of their own."""
    pid = world_rank(recorder, recorder.rank)
    for record in records:
        way = "to" if record.operation == "send" else "from"
        both: Event = {
            "name": f"{record.operation} {way} rank {world_rank(recorder, record.peer)}",
            "cat": f"{recorder.group}: messages",
            "id": f"{pid}.{lane}.{record.operation}.{record.number}.{record.ended}",
            "pid": pid,
            "tid": lane,
        }
        yield both | {"ph": "b", "ts": record.entered / 1000, "args": {"bytes": record.nbytes}}
        yield both | {"ph": "e", "ts": record.ended / 1000}


def named(what: str, pid: int, tid: int, name: str) -> Event:
    """A title of a process or lane."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def lasting(name: str, pid: int, tid: int, begin: int, end: int) -> Event:
    """Something from begin to end, given in nanoseconds and written in microseconds."""
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": begin / 1000,
        "dur": max(end - begin, 0) / 1000,
    }
