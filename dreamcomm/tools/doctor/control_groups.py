"""The memory limit of control groups: the least limit on the path to the root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["least_memory", "read_number"]

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of versions 2 and 1


def least_memory(membership: Path = MEMBERSHIP, root: Path = ROOT) -> tuple[int, Path] | None:
    """The limit in bytes, and the folder that sets it; None without a limit.

    A service of systemd or a job of Slurm may have its limit at any level. Inside of a container
    the root is often the container's own group.
    """
    found = []
    for folder in folders(membership, root):
        for name in LIMITS:
            limit = read_number(folder / name)
            if limit is not None:
                found.append((limit, folder))
    return min(found, default=None, key=lambda one: one[0])


def folders(membership: Path, root: Path) -> Iterator[Path]:
    """The folders of this process's groups that may limit memory, from the innermost on."""
    try:
        lines = membership.read_text().splitlines()  # as "number:controllers:/path"
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        inner = PurePosixPath(path.lstrip("/"))
        tops = [root / controllers] if controllers else [root, root / "unified"]
        for top in tops:
            yield from (top / one for one in (inner, *inner.parents))
    yield root
    yield root / "memory"


def read_number(path: Path) -> int | None:
    """The file's number; None if the file is missing or holds no number ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
