"""The machine and the software of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from dreamcomm.tools.bench.room import meminfo


@dataclass(frozen=True)
class Machine:
    """The host, as this process sees it. ``memory`` in bytes, ``cores`` those usable."""

    cpu: str
    cores: int
    memory: int


@dataclass(frozen=True)
class Versions:
    """The data that a reader needs to repeat a run."""

    dreamcomm: str
    torch: str
    python: str
    kernel: str


def this_machine() -> Machine:
    """Reads /proc."""
    return Machine(cpu_model(), len(os.sched_getaffinity(0)), meminfo("MemTotal"))


def cpu_model() -> str:
    """The kernel's name for the processor; some architectures have none."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def these_versions() -> Versions:
    """The setup of the running process."""
    import torch

    return Versions(
        metadata.version("dreamcomm"),
        str(torch.__version__),
        platform.python_version(),
        platform.release(),
    )


def commit() -> str | None:
    """The commit of the source that runs, "-dirty" if it was changed; None outside a checkout."""
    folder = str(Path(__file__).parent)
    try:
        tracked = ["git", "-C", folder, "ls-files", "--error-unmatch", __file__]
        if subprocess.run(tracked, capture_output=True, check=False).returncode != 0:
            return None  # installed, perhaps inside another project's checkout
        described = subprocess.run(
            ["git", "-C", folder, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            capture_output=True,
            check=True,
            text=True,
        )
    except FileNotFoundError:
        return None  # no git
    return described.stdout.strip()


def now() -> str:
    """The date and time, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
