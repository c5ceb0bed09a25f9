"""The table of the matrix: what was told in every cell, and how soon."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import StringIO

from rich.console import Console
from rich.table import Table

from faults.ranks import LATE, Cell, Outcome


@dataclass(frozen=True)
class Line:
    cell: Cell
    seconds: float  # until the last of the ranks was told
    text: str  # of the first

    @classmethod
    def of(cls, cell: Cell, outcome: Outcome, ranks: list[int]) -> Line:
        """The time since a death, or for a late rank the time in the call beyond the timeout."""
        first = min(ranks, key=lambda rank: outcome.told[rank].at)
        if cell.is_late:
            seconds = max(outcome.told[rank].seconds for rank in ranks) - LATE
        elif outcome.struck:
            since = [max(outcome.struck, outcome.told[rank].begun) for rank in ranks]
            at = [outcome.told[rank].at for rank in ranks]
            seconds = max(end - begin for begin, end in zip(since, at, strict=True))
        else:
            seconds = max(outcome.told[rank].seconds for rank in ranks)
        return cls(cell, seconds, outcome.told[first].error)


@dataclass
class Report:
    lines: list[Line] = field(default_factory=list)

    def add(self, line: Line) -> None:
        self.lines.append(line)

    def __str__(self) -> str:
        """One row for each fault and world: places, and the slowest and median time."""
        table = Table(title="Faults: told on all other ranks, in how many milliseconds")
        for name in ("fault", "ranks", "places", "median", "slowest", "in"):
            table.add_column(name, justify="right" if name in ("median", "slowest") else "left")
        groups: dict[tuple[str, int], list[Line]] = {}
        for line in self.lines:
            groups.setdefault((line.cell.fault, line.cell.world), []).append(line)
        for (fault, world), lines in sorted(groups.items(), key=lambda item: item[0]):
            times = sorted(lines, key=lambda line: line.seconds)
            median, slowest = times[len(times) // 2], times[-1]
            table.add_row(
                fault + (" (beyond the timeout)" if slowest.cell.is_late else ""),
                str(world),
                str(len(lines)),
                f"{median.seconds * 1e3:.0f}",
                f"{slowest.seconds * 1e3:.0f}",
                slowest.cell.place,
            )
        text = StringIO()
        Console(file=text, width=110).print(table)
        return text.getvalue()
