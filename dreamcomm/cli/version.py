"""``dreamcomm version``."""

from __future__ import annotations

import platform
from importlib import metadata

from rich.console import Console
from rich.table import Table


def version() -> None:
    """Shows the versions that matter in a report of a problem."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (
        ("dreamcomm", installed("dreamcomm")),
        ("built against torch", torch_of_the_build()),
        ("running torch", installed("torch")),
        ("Python", platform.python_version()),
        ("platform", platform.platform()),
    ):
        table.add_row(name, value)
    Console().print(table, highlight=False)


def installed(name: str) -> str:
    """The version of an installed distribution, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def torch_of_the_build() -> str:
    """Read without loading the compiled module, as a wrong torch is when this is asked."""
    try:
        from dreamcomm._build_info import TORCH_VERSION
    except ModuleNotFoundError:
        return "not built"
    return TORCH_VERSION
