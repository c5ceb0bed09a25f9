"""The last operations of a process, in the format of torch's Flight Recorder.

``python -m torch.distributed.flight_recorder.fr_trace FOLDER`` reads the files of all ranks and
finds where they differ. It knows backends by name, but not dreamcomm, so the files say "gloo". It
expects every member of a group in each operation, so messages between two ranks are recorded as
those of a group of the two. The files contain no lines of the program and no unfinished messages.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamcomm.observe.records import Record, world_rank

if TYPE_CHECKING:
    from dreamcomm._C import Recorder

__all__ = ["dump_flight_record"]

VERSION = "2.10"
STATES = {"running": "started", "done": "completed", "failed": "started"}
DTYPES = {"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double"}
SPREAD = ("all_gather", "gather")  # their output is all blocks
JOINED = ("reduce_scatter", "scatter")  # their input is all blocks
# The analyser takes neighbours with equal numbers for one coalesced call, so numbers are unique:
# those of messages begin here and grow by two, and odd ones belong to messages to a lower rank.
FIRST_MESSAGE = 1 << 40


@dataclass(frozen=True)
class Notes:
    """One group's records, at one moment."""

    recorder: Recorder
    collectives: list[Record]
    messages: list[Record]


def dump_flight_record(prefix: str | os.PathLike[str]) -> Path:
    """Writes the last 2000 operations of each group of this process that keeps a log.

    Args:
        prefix: the begin of the file's path, equal on all ranks; the process's rank in the job is
            appended.

    Returns:
        The file's path.

    Raises:
        ValueError: no group of this process keeps a log, or there is no folder for the file.
        OSError: the file cannot be written.
    """
    from dreamcomm._torch.build_check import check_build

    check_build()
    from dreamcomm import _C

    kept = []
    for one in _C.recorders():
        noted = one.log_records()
        if noted is not None:
            collectives, messages = noted
            kept.append(
                Notes(one, list(map(Record.of, collectives)), list(map(Record.of, messages)))
            )
    if not kept:
        raise ValueError(
            "no group of this process keeps a log: give one pg_options=dreamcomm.Options(log=True)"
            ", or set DREAMCOMM_LOG=1"
        )
    first = kept[0].recorder
    begin = os.fsdecode(prefix)
    if not begin or "\0" in begin:
        raise ValueError(f"dump_flight_record: expected the begin of a file's path, got {prefix!r}")
    path = Path(f"{begin}{world_rank(first, first.rank)}")
    if not path.parent.is_dir():
        raise ValueError(f"dump_flight_record: there is no folder {path.parent}")
    # Several threads may write the file at the same time: the last one's stays.
    new = path.with_name(f"{path.name}.{threading.get_native_id()}.new")
    try:
        new.write_bytes(pickle.dumps(flight_record(kept)))
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return path


def flight_record(kept: list[Notes]) -> dict[str, Any]:
    """The dump as an object."""
    to_wall = time.time_ns() - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    groups: dict[str, dict[str, Any]] = {}
    entries: list[dict[str, Any]] = []
    status: dict[str, dict[str, int]] = {}
    for number, notes in enumerate(kept):
        one = notes.recorder
        everyone = [world_rank(one, rank) for rank in range(one.size)]
        groups[one.group] = config(one.group, everyone)
        if notes.collectives:
            status[str(number)] = progress(notes.collectives[-1])
        for record in notes.collectives:
            about = {"pg_id": number, "process_group": (one.group, "dreamcomm")}
            entries.append(collective(one, record) | about | times(record, to_wall))
        for record in notes.messages:
            if record.peer < 0:  # from any rank, and none has sent it
                continue
            pair = tuple(sorted((one.rank, record.peer)))
            name = f"{one.group}: messages {pair[0]}, {pair[1]}"
            groups[name] = config(name, [world_rank(one, rank) for rank in pair])
            about = {"pg_id": number, "process_group": (name, "dreamcomm")}
            entries.append(message(one, record, pair) | about | times(record, to_wall))
    entries.sort(key=lambda made: made["time_created_ns"])
    for number, made in enumerate(entries):
        made["record_id"] = number
    return {"version": VERSION, "pg_config": groups, "pg_status": status, "entries": entries}


def config(name: str, ranks: list[int]) -> dict[str, Any]:
    """A group and its members."""
    return {"name": name, "desc": "dreamcomm", "ranks": str(ranks)}


def progress(last: Record) -> dict[str, int]:
    """The numbers of a group's last operations."""
    done = last.number if last.state == "done" else last.number - 1
    return {
        "last_enqueued_collective": last.number,
        "last_started_collective": last.number,
        "last_completed_collective": done,
    }


def times(record: Record, to_wall: int) -> dict[str, Any]:
    """The operation's times and end; ``to_wall`` ns convert its times to the wall clock."""
    made: dict[str, Any] = {
        "time_created_ns": record.entered + to_wall,
        "time_discovered_started_ns": record.entered + to_wall,
        "state": STATES[record.state],
        "retired": record.state == "done",
        "timeout_ms": 0,
        "frames": [],
    }
    if record.state == "done":
        made["time_discovered_completed_ns"] = record.ended + to_wall
        made["duration_ms"] = (record.ended - record.entered) / 1e6
    return made


def collective(recorder: Recorder, record: Record) -> dict[str, Any]:
    """One operation. Sizes have one dimension of elements, because no others are recorded."""
    import torch

    found = getattr(torch, record.dtype, None)
    item = found.itemsize if isinstance(found, torch.dtype) else 1
    one, all_ = [record.nbytes // item], [record.nbytes // item * recorder.size]
    name = DTYPES.get(record.dtype, record.dtype)
    return {
        "collective_seq_id": record.number,
        "p2p_seq_id": 0,
        "op_id": record.number,
        "is_p2p": False,
        "profiling_name": f"gloo:{record.operation}",
        "input_sizes": [all_ if record.operation in JOINED else one],
        "output_sizes": [all_ if record.operation in SPREAD else one],
        "input_dtypes": [name],
        "output_dtypes": [name],
    }


def message(recorder: Recorder, record: Record, pair: tuple[int, ...]) -> dict[str, Any]:
    """One message, in the group of its two ranks; its sizes are bytes."""
    sends = record.operation == "send"
    own, other = pair.index(recorder.rank), pair.index(record.peer)
    sender = own if sends else other
    number = FIRST_MESSAGE + 2 * record.number + sender
    return {
        "collective_seq_id": 0,
        "p2p_seq_id": number,
        "op_id": number,
        "is_p2p": True,
        "profiling_name": f"gloo:send {own}->{other}" if sends else f"gloo:recv {own}<-{other}",
        "input_sizes": [[record.nbytes]],
        "output_sizes": [[record.nbytes]],
        "input_dtypes": ["Byte"],
        "output_dtypes": ["Byte"],
    }
