"""The files of a trace: the ranks' parts, and the one they are merged into."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dreamcomm.observe.trace.clocks import align, joined_clocks

__all__ = ["check_regular", "is_of_trace", "merge_traces", "write_json"]

Contents = dict[str, Any]  # of a part, or of a trace


def check_regular(target: Path, call: str) -> None:
    """Checks that a path can be read and replaced: no device, and no pipe, which may be endless."""
    if target.exists() and not target.is_file():
        what = "a folder" if target.is_dir() else "not a regular file"
        raise ValueError(f"{call}: expected the path of a file, but {target} is {what}")


def write_json(path: Path, found: Contents) -> None:
    """Whole or not at all: others wait for the name to appear."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("w") as file:
            json.dump(found, file, separators=(",", ":"))
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def merge_traces(parts: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> None:
    """Writes the ranks' parts into one trace and removes them.

    Times of several hosts are converted to the first host's clock, by the hosts' wall clocks. If
    these contradict the calls, the calls decide: no rank leaves a call before all have entered it.

    Args:
        parts: files that ranks have left beside a trace, or the traces of hosts with their own
            folders.
        path: the trace. If it exists and belongs to the parts, they are added to it; any other
            file is replaced. It may be among the parts, for example by a pattern for both.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: there are no parts; a file is no part of a trace; the parts belong to different
            traces; or the path is no regular file.
        TypeError: ``parts`` is a single path.
    """
    if isinstance(parts, str | os.PathLike):
        raise TypeError(f"dreamcomm.merge_traces: expected a list of parts, got the path {parts!r}")
    paths = [Path(part) for part in parts]
    if not paths:
        raise ValueError("dreamcomm.merge_traces: expected a trace's parts, got none")
    target = Path(path)
    check_regular(target, "dreamcomm.merge_traces")
    found = {part: loaded(part) for part in distinct(paths)}
    names = {part["otherData"]["trace"] for part in found.values()}
    if len(names) > 1:
        raise ValueError(f"these are parts of different traces: {', '.join(map(str, found))}")
    is_there = target.exists()
    together = [found[part] for part in found if not (is_there and part.samefile(target))]
    if is_there:
        there = loaded(target, is_trace=False)
        if there and there["otherData"]["trace"] in names:
            together.insert(0, there)
    align(together)
    events = [event for part in together for event in part["traceEvents"]]
    events.sort(key=lambda event: event.get("ts", -1))
    dropped = {who: n for part in together for who, n in part["otherData"]["dropped"].items()}
    other = {"trace": next(iter(names), ""), "dropped": dropped, **joined_clocks(together)}
    write_json(target, {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other})
    for part in paths:
        if not (part.exists() and part.samefile(target)):
            part.unlink(missing_ok=True)  # it may be named twice


def distinct(paths: list[Path]) -> list[Path]:
    """One of those that are the same file."""
    files = {(found.st_dev, found.st_ino): path for path in paths for found in [path.stat()]}
    return list(files.values())


def is_of_trace(path: Path, name: str) -> bool:
    """Whether the file holds something of the trace of that name."""
    found = loaded(path, is_trace=False)
    return bool(found) and found["otherData"]["trace"] == name


def loaded(path: Path, is_trace: bool = True) -> Contents:
    """A part or a trace. Any other content is an error, or {} if ``is_trace`` is False."""
    try:
        check_regular(path, "dreamcomm.merge_traces")
        found = json.loads(path.read_text())
        other = {"trace": "", **found["otherData"]}
        if (
            isinstance(other["dropped"], dict)
            and isinstance(other["trace"], str)
            and all(isinstance(event.get("ts", 0), int | float) for event in found["traceEvents"])
        ):
            return dict(found, otherData=other)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # it is another kind of file
    if is_trace:
        raise ValueError(f"{path} is no part of a trace")
    return {}
