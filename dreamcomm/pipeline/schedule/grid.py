"""A schedule as text: a row for each rank, a column for each unit of time.

::

    rank 0 | F0 F1 .  .  B0 -- .  B1 --
    rank 1 | .  F0 B0 -- F1 B1 -- .  .

``--`` continues the step before it, and ``.`` is idle. With several stages on a rank, the stage
stands first: ``2F0``. Messages are not shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from dreamcomm.pipeline.schedule.actions import COMPUTES, Action
from dreamcomm.pipeline.schedule.schedule import Schedule
from dreamcomm.pipeline.schedule.simulate import Number, Simulation, Span, simulate

__all__ = ["step_label", "text_grid"]


def text_grid(source: Schedule | Simulation, *, unit: Number = 1) -> str:
    """A schedule as text.

    Args:
        source: a schedule, of which each of F, I and W takes 1 and B takes 2; or a simulation.
        unit: time of one column.

    Returns:
        One line for each rank.

    Raises:
        Deadlock: the schedule deadlocks.
        ValueError: ``unit`` is not above 0.
    """
    if unit <= 0:
        raise ValueError(f"text_grid: a column needs a time above 0, got {unit}")
    run = simulate(source) if isinstance(source, Schedule) else source
    with_stage = len(set(run.schedule.rank_of)) < run.schedule.stages
    rows = [_cells(spans, unit, with_stage) for spans in run.spans]
    columns = max((len(row) for row in rows), default=0)
    width = max((len(cell) for row in rows for cell in row), default=1)
    digits = len(str(max(len(rows) - 1, 0)))
    lines = []
    for rank, row in enumerate(rows):
        row += ["."] * (columns - len(row))
        cells = " ".join(cell.ljust(width) for cell in row)
        lines.append(f"rank {rank:>{digits}} | {cells}".rstrip())
    return "\n".join(lines)


def step_label(action: Action, with_stage: bool) -> str:
    """A short name: ``F0``, or with the stage ``2F0``."""
    return str(action) if with_stage else str(action)[len(str(action.stage)) :]


def _cells(spans: Sequence[Span], unit: Number, with_stage: bool) -> list[str]:
    cells: list[str] = []
    for span in spans:
        if span.action.kind not in COMPUTES:
            continue
        begin, end = round(span.start / unit), round(span.end / unit)
        cells += ["."] * (begin - len(cells))
        steps = [step_label(span.action, with_stage), *["--"] * (end - begin - 1)]
        cells += steps[: max(0, end - len(cells))]
    return cells
