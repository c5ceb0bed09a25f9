"""The harness of the benchmark programs: turns, the times of all ranks, tables and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from dreamcomm.tools.bench.measurement import Measurement, checked, chosen, sized
from dreamcomm.tools.bench.turns import lasted, rotated, slowest, take_turns, together


def test_turns_alternate_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def turn(name: str) -> int:
        order.append(name)
        return len(order)

    found = take_turns({"a": lambda: turn("a"), "b": lambda: turn("b")}, 2, warm_up=1)
    assert "".join(order) == "ababab"
    assert found == {"a": [3, 5], "b": [4, 6]}


def test_no_turn_always_follows_the_same_one_where_the_order_rotates() -> None:
    order: list[str] = []
    take_turns({name: lambda name=name: order.append(name) for name in "abc"}, 3, rotates=True)
    assert "".join(order) == "abcbcacab"
    assert rotated("abc", 4) == ["b", "c", "a"]


def test_a_turn_is_over_when_the_last_rank_has_ended_it() -> None:
    ranks = [{"a": [1.0, 4.0], "b": [2.0, 2.0]}, {"a": [3.0, 2.0], "b": [1.0, 5.0]}]
    assert slowest(ranks) == {"a": [3.0, 4.0], "b": [2.0, 5.0]}
    assert together(ranks)["b"] == [(2.0, 1.0), (2.0, 5.0)]
    assert lasted([{"a": [(1.0, 2.0)]}, {"a": [(1.5, 4.0)]}]) == {"a": [3.0]}
    with pytest.raises(ValueError, match="shorter"):
        slowest([{"a": [1.0, 4.0]}, {"a": [1.0]}])


def test_a_file_says_on_what_its_figures_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    Measurement(path, congestion="reno").write(rounds=3, rows=[{"p50_ms": 1.5}])
    found = json.loads(path.read_text())
    assert list(found) == ["machine", "rounds", "rows"]
    assert list(found["machine"]) == [
        "processor", "cores", "platform", "python", "torch", "dreamcomm", "commit", "date",
        "congestion",
    ]  # fmt: skip
    assert found["rows"] == [{"p50_ms": 1.5}]


def test_without_a_file_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    measurement = Measurement(None)
    measurement.write(rounds=3)
    cells = {("ours", sized(1024, 0)): "1.0", ("theirs", sized(1024, 1)): "2.0"}
    measurement.grid("Steps", cells)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Steps"
    row = next(line for line in lines if "theirs" in line)
    assert [cell.strip() for cell in row.split("│")] == ["", "theirs", "", "2.0", ""]
    assert any("1,024 B" in line for line in lines)
    assert any("+ 1 busy" in line for line in lines)


def test_names_and_files_are_checked_before_minutes_are_spent(tmp_path: Path) -> None:
    assert chosen(None, ["a", "b"], "--way") == ["a", "b"]
    assert chosen(["b"], ["a", "b"], "--way") == ["b"]
    with pytest.raises(typer.BadParameter, match="expected one of a; b"):
        chosen(["c"], ["a", "b"], "--way")
    assert checked(tmp_path / "new.json") == tmp_path / "new.json"
    assert not (tmp_path / "new.json").exists()
    with pytest.raises(typer.BadParameter, match="there is no folder"):
        checked(tmp_path / "none" / "new.json")
