"""The grids, pictures and figures of docs/pipeline.md are those of the schedules."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from dreamcomm.pipeline import Schedule, make_schedule, simulate, svg_grid, text_grid
from dreamcomm.pipeline.schedule import Action, Kind, Simulation

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "pipeline.md").read_text()
RANKS, MICROBATCHES = 4, 8
STAGES = {"GPipe": 4, "1F1B": 4, "Interleaved1F1B": 8, "ZB-H1": 4}


def schedule_of(name: str) -> Schedule:
    return make_schedule(name, RANKS, STAGES[name], MICROBATCHES)


def run_of(name: str) -> Simulation:
    """In which F of a rank's layers takes a unit, however many stages they are."""
    share = Fraction(RANKS, STAGES[name])
    return simulate(schedule_of(name), forward=share, backward_input=share, backward_weight=share)


def boxes(picture: str) -> list[str]:
    """The steps and times in a picture, whatever it looks like."""
    return re.findall(r"<title>(.*?)</title>", picture)


def kept_at_once(row: tuple[Action, ...]) -> int:
    """The most activations that a rank keeps, of all of its stages together."""
    kept = most = 0
    for action in row:
        kept += {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(action.kind, 0)
        most = max(most, kept)
    return most


@pytest.mark.parametrize("name", STAGES)
def test_the_grids_are_those_of_the_schedules(name: str) -> None:
    assert f"```\n{text_grid(schedule_of(name))}\n```" in PAGE


@pytest.mark.parametrize("name", STAGES)
def test_the_pictures_are_those_of_the_schedules(name: str) -> None:
    path = f"img/pipeline-{name.lower()}.svg"
    assert f"({path})" in PAGE
    drawn = boxes((DOCS / path).read_text())
    assert len(drawn) >= 2 * RANKS * MICROBATCHES
    assert drawn == boxes(svg_grid(run_of(name).spans))


@pytest.mark.parametrize("name", STAGES)
def test_the_figures_are_those_of_the_formulas_and_the_simulation(name: str) -> None:
    (row,) = re.findall(rf'^\| `"{name.lower()}"` \|(.*)\|$', PAGE, re.M)
    length, share, kept, *figures = [cell.strip() for cell in row.split("|")]
    run, schedule = run_of(name), schedule_of(name)
    assert figures == [f"{float(run.length):g}", f"{run.bubble:.1%}".replace("%", " %")]
    values = {"K": RANKS, "M": MICROBATCHES, "v": STAGES[name] // RANKS}
    assert value_of(length, values) == run.length
    assert value_of(share, values) == pytest.approx(run.bubble)
    for rank in range(RANKS):
        of_rank = values | {"r": rank}
        assert value_of(kept, of_rank) == kept_at_once(schedule.computes(rank))


def value_of(formula: str, values: dict[str, int]) -> float:
    """What a cell's formula is, in which 3M is a product. Footnotes are left out."""
    text = re.sub(r"\[\^\d\]", "", formula)
    text = re.sub(r"(?<=[\dv)])(?=[KMv(])", "*", text)
    return float(eval(text, {"max": max, "min": min}, values))
