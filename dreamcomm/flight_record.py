"""The last operations of a process, in the format of torch's Flight Recorder.

``python -m torch.distributed.flight_recorder.fr_trace FOLDER`` reads the files of all ranks and
says where they went apart. It knows backends by name, and dreamcomm is none of them: the files
say "gloo". Lines of the program are not in them.
"""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamcomm.records import Record, world_rank

if TYPE_CHECKING:
    from dreamcomm._C import Recorder

__all__ = ["dump_flight_record"]

VERSION = "2.10"
STATES = {"running": "started", "done": "completed", "failed": "started"}
DTYPES = {"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double"}
SPREAD = ("all_gather", "gather")  # their output is all blocks
JOINED = ("reduce_scatter", "scatter")  # their input is


def dump_flight_record(prefix: str | os.PathLike[str]) -> Path:
    """Writes the last 2000 operations of each group of this process that keeps a log.

    Args:
        prefix: of the file's path; the process's rank in the job follows. Equal on all ranks.

    Returns:
        The file's path.

    Raises:
        ValueError: no group of this process keeps a log.
        OSError: the file cannot be written.
    """
    from dreamcomm._compat import check_build

    check_build()
    from dreamcomm import _C

    kept = [one for one in _C.recorders() if one.log_records() is not None]
    if not kept:
        raise ValueError(
            "no group of this process keeps a log: give one pg_options=dreamcomm.Options(log=True)"
            ", or set DREAMCOMM_LOG=1"
        )
    path = Path(f"{os.fspath(prefix)}{world_rank(kept[0], kept[0].rank)}")
    new = path.with_name(path.name + ".new")
    new.write_bytes(pickle.dumps(flight_record(kept)))
    new.rename(path)
    return path


def flight_record(recorders: list[Recorder]) -> dict[str, Any]:
    """The dump as an object."""
    to_wall = time.time_ns() - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    groups = {one.group: one for one in recorders}
    entries: list[dict[str, Any]] = []
    for number, one in enumerate(recorders):
        collectives, messages = one.log_records() or ([], [])
        for fields in (*collectives, *messages):
            entries.append(entry(one, number, Record.of(fields), to_wall))
    entries.sort(key=lambda made: made["time_created_ns"])
    for number, made in enumerate(entries):
        made["record_id"] = number
    return {
        "version": VERSION,
        "pg_config": {name: config(one) for name, one in groups.items()},
        "pg_status": {
            str(i): status(Record.of(one.log_records()[0][-1]))  # type: ignore[index]
            for i, one in enumerate(recorders)
            if (one.log_records() or ([], []))[0]
        },
        "entries": entries,
    }


def config(recorder: Recorder) -> dict[str, Any]:
    """A group and its members."""
    ranks = [world_rank(recorder, rank) for rank in range(recorder.size)]
    return {"name": recorder.group, "desc": "dreamcomm", "ranks": str(ranks)}


def status(last: Record) -> dict[str, int]:
    """How far a group has come."""
    done = last.number if last.state == "done" else last.number - 1
    return {
        "last_enqueued_collective": last.number,
        "last_started_collective": last.number,
        "last_completed_collective": done,
    }


def entry(recorder: Recorder, number: int, record: Record, to_wall: int) -> dict[str, Any]:
    """One operation; ``to_wall`` makes its times those of a clock on the wall."""
    message = record.operation in ("send", "recv")
    made = {
        "record_id": 0,
        "pg_id": number,
        "process_group": (recorder.group, "dreamcomm"),
        "collective_seq_id": 0 if message else record.number,
        "p2p_seq_id": record.number if message else 0,
        "op_id": record.number,
        "profiling_name": f"gloo:{title(recorder, record)}",
        "time_created_ns": record.entered + to_wall,
        "time_discovered_started_ns": record.entered + to_wall,
        "state": STATES[record.state],
        "is_p2p": message,
        "retired": record.state == "done",
        "timeout_ms": 0,
        "frames": [],
        **sizes(recorder, record),
    }
    if record.state == "done":
        made["time_discovered_completed_ns"] = record.ended + to_wall
        made["duration_ms"] = (record.ended - record.entered) / 1e6
    return made


def title(recorder: Recorder, record: Record) -> str:
    """As torch names the operation: "all_reduce", "send 0->1"."""
    if record.operation == "send":
        return f"send {recorder.rank}->{record.peer}"
    if record.operation == "recv":
        return f"recv {recorder.rank}<-{record.peer}"
    return record.operation


def sizes(recorder: Recorder, record: Record) -> dict[str, Any]:
    """Of input and output, as one dimension of elements, which is all that is noted."""
    import torch
    from torch import dtype as torch_dtype

    found = getattr(torch, record.dtype, None)
    item = found.itemsize if isinstance(found, torch_dtype) else 1
    one, all_ = [record.nbytes // item], [record.nbytes // item * recorder.size]
    name = DTYPES.get(record.dtype, record.dtype)
    return {
        "input_sizes": [all_ if record.operation in JOINED else one],
        "output_sizes": [all_ if record.operation in SPREAD else one],
        "input_dtypes": [name],
        "output_dtypes": [name],
    }
