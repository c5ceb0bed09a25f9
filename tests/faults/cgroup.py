"""A memory cgroup, in which the kernel's killer ends who takes too much."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class NoCgroup(Exception):
    """Why there can be none here."""


@contextmanager
def limited_memory(limit: int) -> Iterator[Path]:
    """The folder of a new cgroup that has ended its processes when the block ends.

    Raises NoCgroup where that needs another user, another kernel or another container.
    """
    is_v1 = (ROOT / "memory").is_dir()
    folder = (ROOT / "memory" if is_v1 else ROOT) / f"dreamcomm-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoCgroup(f"no memory cgroup can be made here: {error}") from None
    try:
        try:
            (folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
        except OSError as error:
            raise NoCgroup(f"a cgroup's memory cannot be limited here: {error}") from None
        yield folder
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """Its last process may not have gone quite yet."""
    for _ in range(100):
        try:
            return folder.rmdir()
        except OSError:
            time.sleep(0.05)


def killed_in(folder: Path) -> int:
    """How many processes the kernel's killer has ended there."""
    names = [name for name in ("memory.events", "memory.oom_control") if (folder / name).exists()]
    for line in (folder / names[0]).read_text().splitlines():
        key, value = line.split()
        if key == "oom_kill":
            return int(value)
    return 0
