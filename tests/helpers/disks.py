"""Whether a test's folder lies on a disk."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

__all__ = ["skip_in_memory"]


def skip_in_memory(path: Path) -> None:
    """Skips the test if the folder is memory: files there are refused."""
    kind = subprocess.check_output(["stat", "-f", "-c", "%T", str(path)], text=True).strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip(f"{path} is memory ({kind}): give pytest --basetemp on a disk")
