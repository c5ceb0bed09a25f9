"""Predictions as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from dreamcomm.tools.bench.report import format_time
from dreamcomm.tools.bench.sizes import format_size
from dreamcomm.tools.simulate.scaling import Line


def table(op: str, lines: list[Line]) -> Table:
    """The time for each cluster and size, how it is carried out, and a flat ring's time."""
    made = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=f"{op}, predicted", title_justify="left"
    )
    rings = any(line.ring for line in lines)
    steps = any(line.step is not None for line in lines)
    for heading in ("hosts", "ranks", "size", "time"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("by", no_wrap=True)
    for heading in ["flat ring"] * rings + ["DDP step", "efficiency"] * steps:
        made.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        for row in rows_of(line, rings):
            made.add_row(*row)
        made.add_section()
    return made


def rows_of(line: Line, rings: bool) -> list[list[str]]:
    """A row for each size; the cluster's own cells are in the first row."""
    rows: list[list[str]] = []
    for nbytes, forecast in line.by_size.items():
        first = not rows
        row = [str(line.hosts), str(line.ranks)] if first else ["", ""]
        size = format_size(nbytes) if nbytes else ""  # a barrier has none
        row += [size, format_time(forecast.seconds), forecast.way.split(",")[0]]
        if rings:
            row.append(format_time(line.ring[nbytes]) if nbytes in line.ring else "")
        if first and line.step is not None:
            row += [format_time(line.step.seconds), f"{line.step.efficiency:.0%}"]
        rows.append(row)
    return rows


def to_json(op: str, lines: list[Line]) -> dict[str, Any]:
    """Times in seconds, sizes in bytes."""
    return {"op": op, "lines": [asdict(line) for line in lines]}
