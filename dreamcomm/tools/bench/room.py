"""Whether a case fits into memory."""

from __future__ import annotations

from pathlib import Path

from dreamcomm.tools.bench.cases import Case
from dreamcomm.tools.bench.sizes import format_size

# Buffers of dreamcomm and of the other backend, staging, and memory of verification.
COPIES = 3
CGROUP = Path("/sys/fs/cgroup")


def shortage(case: Case, available: int) -> str | None:
    """Says how much is missing, or None if ``available`` bytes are enough for all ranks."""
    needed = case.world * case.tensor_bytes() * COPIES
    if needed <= available:
        return None
    return f"needs about {in_mib(needed)}, {in_mib(available)} are available"


def available_memory() -> int:
    """Bytes that can be taken without swapping, on this host and in this container."""
    limits = [meminfo("MemAvailable")]
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        limits.append(int(text) - int(used.read_text()))
    return max(0, min(limits))


def meminfo(key: str) -> int:
    """A line of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) << 10
    raise KeyError(f"/proc/meminfo has no line {key}")


def in_mib(size: int) -> str:
    """Rounded up to whole MiB."""
    return format_size(-(-size >> 20) << 20) if size else "0 B"
