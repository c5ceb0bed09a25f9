"""The data that identify a figure later: machine, versions, commit, date."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import typer

from dreamcomm.tools.bench.machine import commit, now, these_versions, this_machine
from dreamcomm.tools.bench.run import check_outputs


def describe_machine() -> dict[str, Any]:
    """The processor, its usable cores, versions, the commit of the source and the time now."""
    here, versions = this_machine(), these_versions()
    return {
        "processor": here.cpu,
        "cores": here.cores,
        "platform": platform.platform(),
        "python": versions.python,
        "torch": versions.torch,
        "dreamcomm": versions.dreamcomm,
        "commit": commit() or "unknown",
        "date": now(),
    }


def check_output(path: Path | None) -> None:
    """Refuses a file that could not be written in the end."""
    try:
        check_outputs(path, None)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--json") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
