"""Schedules in torch's CSV files: a row for each rank, a cell for each step.

An empty cell is a step in which the rank is idle. torch calls a file without messages
"compute_only", and one with messages "compute_comms".
"""

from __future__ import annotations

import csv
from os import PathLike
from pathlib import Path

from dreamcomm.pipeline.schedule.actions import COMPUTES, Action, Kind
from dreamcomm.pipeline.schedule.schedule import Schedule
from dreamcomm.pipeline.schedule.simulate import Deadlock, simulate

__all__ = ["read_csv", "write_csv"]


def read_csv(path: str | PathLike[str], *, stages: int | None = None) -> Schedule:
    """The schedule in a file, named after the file.

    A stage is on the rank whose row has its forwards. The file is not checked further: ``check``
    says whether the schedule can run.

    Args:
        path: of a file that ``write_csv`` or torch has written.
        stages: number of stages; None to count those in the file.

    Raises:
        ValueError: a cell is not an action, the rows do not say on which rank a stage is, or the
            file has another number of stages than ``stages``.
    """
    with open(path, newline="", encoding="utf-8") as file:
        cells = list(csv.reader(file))
    rows = tuple(_row(path, rank, texts) for rank, texts in enumerate(cells))
    rank_of = _rank_of(path, rows)
    if stages is not None and stages != len(rank_of):
        raise ValueError(f"{path}: has {len(rank_of)} stages, expected {stages}")
    computes = [part for row in rows for part in _computes(row)]
    microbatches = 1 + max(part.microbatch or 0 for part in computes)
    return Schedule(Path(path).stem, len(rank_of), microbatches, rows, rank_of)


def write_csv(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Writes a schedule to a file that torch can read too.

    Without messages and idle cells of its own, the schedule is written on a grid: every step takes
    one column, and an idle rank has empty cells. Otherwise, or if it would deadlock, rows are
    written as they are; torch takes no empty cells in a file with messages.

    Args:
        schedule: what to write.
        path: of the file; an existing one is replaced.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for row in _on_a_grid(schedule):
            writer.writerow("" if action is None else str(action) for action in row)


def _row(path: str | PathLike[str], rank: int, texts: list[str]) -> tuple[Action | None, ...]:
    row: list[Action | None] = []
    for column, text in enumerate(texts):
        try:
            row.append(Action.parse(text) if text.strip() else None)
        except ValueError as error:
            raise ValueError(f"{path}, row of rank {rank}, cell {column}: {error}") from None
    return tuple(row)


def _computes(row: tuple[Action | None, ...]) -> list[Action]:
    parts = [part for action in row if action is not None for part in action.parts]
    return [part for part in parts if part.kind in COMPUTES]


def _rank_of(
    path: str | PathLike[str], rows: tuple[tuple[Action | None, ...], ...]
) -> tuple[int, ...]:
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for part in _computes(row):
            if part.kind is Kind.F and rank_of.setdefault(part.stage, rank) != rank:
                raise ValueError(
                    f"{path}, row of rank {rank}: {part} is of stage {part.stage}, whose forwards "
                    f"are in the row of rank {rank_of[part.stage]}: a stage is on one rank"
                )
    missing = set(range(max(rank_of, default=0) + 1)) - set(rank_of)
    if missing:
        raise ValueError(
            f"{path}: no row has a forward of stage {min(missing)}, so its rank is not known"
        )
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def _on_a_grid(schedule: Schedule) -> tuple[tuple[Action | None, ...], ...]:
    """The rows with idle cells, so that steps of the same time are in the same column."""
    has_idle = any(None in row for row in schedule.ranks)
    has_parts = any(action.sub for row in schedule.ranks for action in row if action is not None)
    if has_idle or has_parts or schedule.has_messages:
        return schedule.ranks
    try:
        run = simulate(schedule, backward_weight=lambda action: int(action.kind is Kind.W))
    except Deadlock:
        return schedule.ranks
    rows = []
    for spans in run.spans:
        row: list[Action | None] = []
        for span in spans:
            row += [None] * (int(span.start) - len(row))
            row.append(span.action)
        rows.append(tuple(row))
    return tuple(rows)
