"""The harness of the benchmark programs: cases take turns, and a Measurement shows them.

    seconds = slowest(dreamcomm.spawn(run_rank, 2))  # run_rank calls take_turns (turns.py)
    found = Measurement(json)
    found.table("Steps", ("", "p50"), [(name, f"{median(s):.1f}") for name, s in seconds.items()])
    found.write(steps=seconds)

A file has the machine, the versions, the commit and the date of its figures under "machine".
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dreamcomm.tools.bench.machine import commit, now, these_versions, this_machine
from dreamcomm.tools.bench.outputs import check_output, write_json

WIDTH = 160  # without a terminal


def checked(path: Path | None) -> Path | None:
    """Refuses a file that could not be written in the end."""
    try:
        check_output(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return path


# Options that programs share.
Json = Annotated[
    Path | None, typer.Option("--json", help="Where to write the figures.", callback=checked)
]
World = Annotated[int, typer.Option(min=1, max=16, help="Ranks.")]
Beside = Annotated[int, typer.Option(min=0, help="Busy processes beside the ranks.")]
BesideEach = Annotated[
    list[int] | None, typer.Option("--beside", min=0, help="Busy processes; 0 and 1 if not given.")
]


def sized(nbytes: int, beside: int) -> str:
    """The heading of a column for a size, beside so many busy processes."""
    return f"{nbytes:,} B" + (f"\n+ {beside} busy" if beside else "")


def chosen(given: list[str] | None, known: Iterable[str], option: str) -> list[str]:
    """All names that are known, or those that were given. Raises BadParameter for others."""
    names = [*known]
    for name in given or []:
        if name not in names:
            raise typer.BadParameter(f"expected one of {'; '.join(names)}", param_hint=option)
    return given or names


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


def console_of(width: int) -> Console:
    """The terminal; elsewhere text of so many columns."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


class Measurement:
    """The figures of one run of a program, as tables and as a file.

    ``machine``: what identifies them beside :func:`describe_machine`.
    """

    def __init__(self, json: Path | None, **machine: object) -> None:
        self._json, self._machine = json, machine
        self._console = console_of(WIDTH)

    def table(
        self,
        title: str,
        headings: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        names: int = 1,
        caption: str | None = None,
    ) -> None:
        """Prints rows; the first ``names`` columns are left-aligned."""
        table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="left" if number < names else "right", no_wrap=True)
        for row in rows:
            table.add_row(*map(str, row))
        self._console.print(table)

    def grid(self, title: str, cells: Mapping[tuple[str, str], str]) -> None:
        """Prints cells by the names of their row and column, in the order in which they come."""
        columns = [*dict.fromkeys(column for _, column in cells)]
        rows = {row: [cells.get((row, one), "") for one in columns] for row, _ in cells}
        self.table(title, ["", *columns], ([row, *texts] for row, texts in rows.items()))

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, highlight=False)

    def write(self, **content: object) -> None:
        """Writes the file, if one was asked for."""
        if self._json is not None:
            write_json(self._json, {"machine": describe_machine() | self._machine, **content})
