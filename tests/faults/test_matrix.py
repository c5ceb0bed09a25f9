"""Every fault in every place: each rank is told what is wrong, and nothing is left over.

The table of all cells is printed at the end. Times are told there, not tested.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.places import PLACES, TWISTS, VICTIM
from faults.ranks import FAULTS, Cell, Outcome, run_cell
from faults.report import Line, Report

pytestmark = pytest.mark.beyond_gloo("gloo names no rank")

# In the words of at least one rank, beside the victim's number in those of all.
WORDS = {
    "sleeps": "sleeps or waits, outside of all collectives",
    "is in another group": ", is in barrier as call 1,",
    "is stopped": "is stopped (SIGSTOP or a debugger)",
    "kill -9": "the process of rank 1 has ended",
    "segfault": "the process of rank 1 has ended",
    "os._exit": "the process of rank 1 has ended",
    "exception": "the process of rank 1 has ended",
    "Ctrl-C": "the process of rank 1 has ended",
}

CELLS = [Cell(fault, place, world) for world in (2, 4) for place in PLACES for fault in FAULTS]
MISMATCHES = [
    Cell(f"other {twist}", place, world)
    for world in (2, 4)
    for place, twists in TWISTS.items()
    for twist in twists
]


def name_of(cell: Cell) -> str:
    return f"{cell.fault}, {cell.place}, {cell.world} ranks"


def check_left(cell: Cell, outcome: Outcome, ranks: list[int]) -> None:
    for rank in ranks:
        told = outcome.told[rank]
        assert not told.problems, f"{name_of(cell)}: {told.problems}"
        assert told.before_census == told.after_census, name_of(cell)
        assert outcome.exits[rank] == 0, name_of(cell)


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_a_rank_is_late_or_gone(cell: Cell, tmp_path: Path, report: Report, soak: bool) -> None:
    if not soak and not is_short(cell):
        pytest.skip("only with --soak")
    outcome = run_cell(cell, str(tmp_path))
    others = [rank for rank in cell.members if rank != VICTIM]
    assert set(others) <= set(outcome.told), f"no word of {set(others) - set(outcome.told)}"
    for rank in others:
        told = outcome.told[rank]
        assert told.kind == "DistBackendError", told.error or "no error"
        assert f"rank {VICTIM}" in told.error, told.error
        assert f"rank {VICTIM}" in told.after, told.after
    if cell.fault == "is in another group":
        assert "has left the group" in outcome.told[VICTIM].error, outcome.told[VICTIM]
    texts = [outcome.told[rank].error for rank in others]
    assert any(WORDS[cell.fault] in text for text in texts), texts
    check_left(cell, outcome, others)
    report.add(Line.of(cell, outcome, others))


def is_short(cell: Cell) -> bool:
    """In the suite: each fault, and each place, at least once."""
    if cell.fault in FAULTS and cell.world == 2:
        return cell.fault in ("kill -9", "sleeps") or cell.place == "all_reduce"
    if cell.world == 2:
        return True
    return cell.fault in ("kill -9", "other size") and cell.place in ("all_reduce", "recv")


@pytest.mark.parametrize("cell", MISMATCHES, ids=name_of)
def test_ranks_disagree(cell: Cell, tmp_path: Path, report: Report, soak: bool) -> None:
    if not soak and not is_short(cell):
        pytest.skip("only with --soak")
    outcome = run_cell(cell, str(tmp_path))
    assert set(cell.members) <= set(outcome.told)
    for rank in cell.members:
        told = outcome.told[rank]
        # torch puts the errors of communication hooks into words of its own.
        assert "DistBackendError" in (told.kind, *told.error.split(": ")), told.error or "no error"
        assert f"rank {VICTIM}" in told.error, told.error
        assert told.after == "works", told.after
        assert told.error.count("places.py:") == 2, told.error
    check_left(cell, outcome, cell.members)
    report.add(Line.of(cell, outcome, cell.members))
