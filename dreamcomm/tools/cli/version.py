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
        ("built against torch", of_the_build("TORCH_VERSION", "not built")),
        ("CUDA kernels", kernels()),
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


def kernels() -> str:
    """The CUDA version and the GPU architectures of the build, or why it has no kernels."""
    built = of_the_build("CUDA_VERSION", "not built")
    if built == "not built":
        return built
    if not built:
        return f"none: {of_the_build('WITHOUT_CUDA', '')}"
    return f"{built}, for {of_the_build('CUDA_ARCHITECTURES', '')}"


def of_the_build(name: str, missing: str) -> str:
    """Read without loading the compiled module, as a wrong torch is when this is asked."""
    try:
        from dreamcomm import _build_info
    except ModuleNotFoundError:
        return missing
    return str(getattr(_build_info, name))
