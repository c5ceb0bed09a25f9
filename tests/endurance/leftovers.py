"""What processes that have ended must not leave behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from helpers.census import child_ids, shared_memory_files

LABEL = "/memfd:dreamcomm"


def left_by(pids: Sequence[int], supervisor: int, files: set[str]) -> list[str]:
    """``files``: those that were in /dev/shm before; in words, with nothing left: nothing."""
    found = [f"process {pid} is still there" for pid in pids if Path(f"/proc/{pid}").exists()]
    found += [f"/dev/shm/{name}" for name in sorted(shared_memory_files() - files)]
    # Those that never were ranks hold none of the ranks' memory.
    for pid in (supervisor, *child_ids(supervisor)):
        found += [f"process {pid} holds {name}" for name in memory_of_ranks(pid)]
    return found


def memory_of_ranks(pid: int) -> Iterator[str]:
    """Shared memory of ranks that the process has open or mapped."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = os.readlink(descriptor)
        except OSError:  # closed by now
            continue
        if link.startswith(LABEL):
            yield link
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if LABEL in line:
            yield line
