"""Counts what a process holds: to see that nothing is left behind."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Census:
    """What /proc says of this process."""

    descriptors: int
    threads: int
    shared_mappings: tuple[str, ...]  # files that are mapped to be written and shared
    children: int


def census() -> Census:
    gc.collect()
    return Census(
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        shared_mappings=tuple(sorted(shared_mappings())),
        children=len(child_ids(os.getpid())),
    )


def shared_mappings() -> list[str]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1].endswith("s") and "w" in fields[1]:
            found.append(fields[5])
    return found


def child_ids(pid: int) -> set[int]:
    """The processes whose parent is `pid`."""
    found = set()
    for other in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path("/proc", other, "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if parent == pid:
            found.add(int(other))
    return found


def shared_memory_files() -> set[str]:
    """Names in /dev/shm, less those of torch's own tensor sharing and of Python's semaphores."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("torch_", "sem.mp-"))}
