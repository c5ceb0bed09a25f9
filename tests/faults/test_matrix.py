"""Every fault in every place: each rank soon gets the right error, and nothing is left over.

The table of all cells is printed at the end.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from faults.cgroup import NoCgroup, killed_in, limited_memory
from faults.places import LARGE, MESSAGES, PLACES, TWISTS, VICTIM
from faults.ranks import LATE, Cell, Outcome, run_cell
from faults.report import Line, Report
from faults.strikes import FAULTS

pytestmark = pytest.mark.beyond_gloo("gloo names no rank")

# In the words of at least one rank, beside the victim's number in those of all.
WORDS = {
    "sleeps": "sleeps or waits, outside of all collectives",
    "is in another group": ", is in barrier as call 1,",
    "is stopped": "is stopped (SIGSTOP or a debugger)",
    "kill -9": "the process of rank 1 has ended",
    "out of memory": "the process of rank 1 has ended",
    "segfault": "the process of rank 1 has ended",
    "os._exit": "the process of rank 1 has ended",
    "exception": "the process of rank 1 has ended",
    "Ctrl-C": "the process of rank 1 has ended",
    "Ctrl-C inside": "rank 1",  # that it was interrupted, or has ended
}

# What is promised of how soon the others are told: a second after a death, and at a timeout a
# tenth of it later. A tenth of the matrix' short one is doubled: four ranks share two processors.
NOTICED = 1.0
AFTER_THE_TIMEOUT = 2 * 0.1 * LATE
MISMATCH_TOLD = 1.0
GROWTH = 1 << 20  # bytes that malloc has given out beyond those before: some KiB are usual
MEMORY = 32 << 20  # bytes until a rank has too much

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
        assert told.growth < GROWTH, f"{name_of(cell)}: {told.growth} bytes"
        assert outcome.exits[rank] == 0, name_of(cell)


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_a_rank_is_late_or_gone(
    cell: Cell, tmp_path: Path, report: Report, soak: bool, slack: float
) -> None:
    if not soak and not is_short(cell):
        pytest.skip("only with --soak")
    if cell.fault == "out of memory":
        outcome = run_out_of_memory(cell, tmp_path)
    else:
        outcome = run_cell(cell, str(tmp_path))
    others = [rank for rank in cell.members if rank != VICTIM]
    assert set(others) <= set(outcome.told), f"no report of {set(others) - set(outcome.told)}"
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
    line = Line.of(cell, outcome, others)
    report.add(line)
    promised = AFTER_THE_TIMEOUT if cell.is_late else NOTICED
    assert line.seconds < promised + slack, name_of(cell)


def run_out_of_memory(cell: Cell, folder: Path) -> Outcome:
    try:
        with limited_memory(MEMORY) as cgroup:
            Path(folder, "cgroup").symlink_to(cgroup)
            outcome = run_cell(cell, str(folder))
            assert killed_in(cgroup) == 1
    except NoCgroup as why:
        pytest.skip(str(why))
    assert outcome.exits[VICTIM] == -9
    return outcome


def is_short(cell: Cell) -> bool:
    """In the suite: each fault, and each place, at least once."""
    if cell.world == 4:
        return cell.fault in ("kill -9", "other size") and cell.place == "all_reduce"
    some = ("kill -9", "other size", "other root", "other split")
    return cell.place == "all_reduce" or cell.fault in some


@pytest.mark.parametrize("cell", MISMATCHES, ids=name_of)
def test_ranks_disagree(
    cell: Cell, tmp_path: Path, report: Report, soak: bool, slack: float
) -> None:
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
        if cell.place in MESSAGES:  # both sizes, and no line
            sizes = {int(number) for number in re.findall(r"\b1200\d\d\d\b", told.error)}
            assert sizes == {4 * LARGE, 4 * LARGE + 4}, told.error
        else:
            assert told.error.count("places.py:") == 2, told.error
            assert re.search(r" as call \d", told.error), told.error
    check_left(cell, outcome, cell.members)
    line = Line.of(cell, outcome, cell.members)
    report.add(line)
    assert line.seconds < MISMATCH_TOLD + slack, name_of(cell)
