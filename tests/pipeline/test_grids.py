"""Schedules as CSV files, as text and as pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from fractions import Fraction
from pathlib import Path

import pytest

from dreamcomm.pipeline.schedule import (
    Action,
    Kind,
    Schedule,
    Span,
    check,
    make_schedule,
    one_f_one_b,
    read_csv,
    simulate,
    svg_grid,
    text_grid,
    with_messages,
    write_csv,
    zero_bubble_h1,
)

SVG = "{http://www.w3.org/2000/svg}"


def test_a_csv_file_is_a_grid(tmp_path: Path) -> None:
    path = tmp_path / "1f1b.csv"
    write_csv(one_f_one_b(2, 2), path)
    assert path.read_text().splitlines() == ["0F0,0F1,,0B0,,0B1", ",1F0,1B0,1F1,1B1"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved1f1b", "zb-h1"])
def test_csv_files_are_read_as_written(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, 4, 8 if name == "interleaved1f1b" else 4, 5)
    for written in (schedule, with_messages(schedule)):
        write_csv(written, tmp_path / "a.csv")
        read = read_csv(tmp_path / "a.csv", stages=schedule.stages)
        assert (read.name, read.stages, read.microbatches) == ("a", schedule.stages, 5)
        assert read.rank_of == schedule.rank_of
        assert [read.actions(r) for r in range(4)] == [written.actions(r) for r in range(4)]
        check(read)
        write_csv(read, tmp_path / "b.csv")
        assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "a.csv").read_bytes()


def test_a_schedule_that_deadlocks_is_written_too(tmp_path: Path) -> None:
    rows = ((Action(0, Kind.B, 0), Action(0, Kind.F, 0)),)
    write_csv(Schedule("stuck", 1, 1, rows, (0,)), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text().strip() == "0B0,0F0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row of rank 1, cell 1: '1X0' is not an action"),
        ("0F0\n1F0,0F1\n", "row of rank 1: 0F1 is of stage 0, .* in the row of rank 0"),
        ("0F0\n2F0\n", "no row has a forward of stage 1"),
        ("", "no row has a forward of stage 0"),
        ("0F0\n", "has 1 stages, expected 2"),
    ],
)
def test_wrong_csv_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_csv(path, stages=2)


def test_text() -> None:
    assert text_grid(one_f_one_b(2, 2)).splitlines() == [
        "rank 0 | F0 F1 .  .  B0 -- .  B1 --",
        "rank 1 | .  F0 B0 -- F1 B1 -- .  .",
    ]
    assert text_grid(with_messages(one_f_one_b(2, 2))) == text_grid(one_f_one_b(2, 2))
    assert text_grid(zero_bubble_h1(2, 2)).splitlines()[1] == "rank 1 | .  F0 I0 F1 I1 W0 W1"


def test_text_with_several_stages_a_rank() -> None:
    assert text_grid(make_schedule("interleaved1f1b", 2, 4, 1)).splitlines() == [
        "rank 0 | 0F0 .   2F0 .   .   .   2B0 --  .   .   0B0 --",
        "rank 1 | .   1F0 .   3F0 3B0 --  .   .   1B0 --  .   .",
    ]


def test_text_of_other_times() -> None:
    run = simulate(one_f_one_b(2, 1), forward=0.5, backward_input=0.5, backward_weight=0.5)
    assert text_grid(run, unit=0.5) == text_grid(one_f_one_b(2, 1))
    with pytest.raises(ValueError, match="above 0"):
        text_grid(run, unit=0)


def boxes(picture: str) -> list[ET.Element]:
    root = ET.fromstring(picture)
    return [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved1f1b", "zb-h1"])
def test_pictures(name: str) -> None:
    schedule = make_schedule(name, 4, 8 if name == "interleaved1f1b" else 4, 5)
    run = simulate(schedule)
    picture = svg_grid(run.spans, title="a < b & c")
    drawn = boxes(picture)
    assert len(drawn) == sum(len(row) for row in run.spans)
    # The boxes fill what the bubble leaves of the rows.
    rows = [box for box in ET.fromstring(picture).iter(f"{SVG}rect") if box.get("class") == "idle"]
    size = sum(float(box.get("width", 0)) for box in drawn)
    full = sum(float(row.get("width", 0)) for row in rows if row.get("width") != "14")
    assert size / full == pytest.approx(1 - run.bubble, abs=1e-3)
    assert "a &lt; b &amp; c" in picture
    assert "prefers-color-scheme: dark" in picture


def test_a_picture_of_measured_times() -> None:
    row = [
        Span(Action(0, Kind.F, 0), 100.25, 100.5),
        Span(Action(0, Kind.SEND_F, 0), 100.5, 100.5),
        Span(Action(0, Kind.B, 0), 100.75, 101.25),
    ]
    picture = svg_grid([row, []], unit="s")
    tips = [box.findtext(f"{SVG}title") for box in boxes(picture)]
    assert tips == ["0F0: 0 to 0.25 s", "0SEND_F0: 0.25 to 0.25 s", "0B0: 0.5 to 1 s"]
    assert "rank 1" in picture
    assert "1 s</text>" in picture


def test_a_picture_of_nothing() -> None:
    assert boxes(svg_grid([])) == []
    assert boxes(svg_grid([[], []])) == []
    exact = [[Span(Action(0, Kind.F, 0), Fraction(1, 3), Fraction(2, 3))]]
    assert len(boxes(svg_grid(exact))) == 1
