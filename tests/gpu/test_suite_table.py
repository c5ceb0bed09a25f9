"""The table of the GPU suite: goals met and missed, and what was not measured."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The programs find those beside them as they do when they are run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("lines", "figures", "table", "facts")
    loaded = {name: importlib.import_module(name) for name in names}
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return loaded


@pytest.fixture
def figures(modules: Any) -> Any:
    return modules["figures"]


def row(ranks: int, share: float, **more: Any) -> dict[str, Any]:
    made = {"figure": "row", "call": "all_reduce", "row": "push", "bytes": 256 << 20}
    return made | {"ranks": ranks, "share": share, "goal": 0.85, "verified": True} | more


def bucket(ratio: float, share: float, **more: Any) -> dict[str, Any]:
    made = {"figure": "bucket", "parameters": "ResNet-50, whole", "pass": "pack", "verified": True}
    goals = {"bytes_bound": True, "ratio_goal": 1.3, "share_goal": 0.9, "best_peer": "mul_"}
    return made | goals | {"ratio": ratio, "share": share} | more


def collective(size: int, ratio: float | None, **more: Any) -> dict[str, Any]:
    made = {"ranks": 2, "dtype": "float32", "bytes": size, "verified": True, "ratio": ratio}
    made |= {"made": "by a graph"}
    goals = {"goal": 1.0, "median_goal": 1.2, "best_peer": "one_shot", "sharing": "turns"}
    return made | goals | more


def small(size: int, ratio: float) -> dict[str, Any]:
    made = {"ranks": 4, "bytes": size, "us": 5 * ratio, "barrier_us": 5.0, "verified": True}
    return made | {"ratio": ratio, "goal": 1.5}


def test_nothing_measured_is_said_for_every_figure(figures: Any) -> None:
    found = figures.figures(figures.Found())
    assert len(found) > 30
    for figure in found:
        assert figure.measured in ("not run", "not measured")
        assert figure.met is None


@pytest.mark.parametrize(
    ("shares", "met", "words"),
    [
        ((0.9, 0.86, 0.85), True, "8 virtual ranks: 85 %"),
        ((0.9, 0.86, 0.84), False, "8 virtual ranks: 84 %"),
        ((0.9, 0.86), None, "8 virtual ranks: not measured"),
        ((0.9, 0.8), False, "8 virtual ranks: not measured"),
    ],
)
def test_a_row_meets_its_goal_on_all_numbers_of_ranks(
    figures: Any, shares: tuple[float, ...], met: bool | None, words: str
) -> None:
    lines = [row(ranks, share) for ranks, share in zip((2, 4, 8), shares, strict=False)]
    first = figures.rows(lines)[0]
    assert first.name == "all_reduce, push, 256 MiB a rank"
    assert first.met is met
    assert words in first.measured


def test_wrong_results_meet_no_goal(figures: Any) -> None:
    lines = [row(ranks, 0.99, verified=ranks != 4) for ranks in (2, 4, 8)]
    assert figures.rows(lines)[0].met is False
    assert "WRONG RESULTS" in figures.rows(lines)[0].measured
    (wrong,) = figures.bucket_figures(bucket(2.0, 1.0, verified=False))
    assert (wrong.measured, wrong.met) == ("WRONG RESULTS", False)


def test_other_calls_are_missing_where_one_was_measured(figures: Any) -> None:
    names = [figure.name for figure in figures.rows([row(2, 0.9)])]
    assert names[1:] == [
        "reduce_scatter, every row",
        "all_gather, every row",
        "broadcast, every row",
    ]


def test_small_calls_are_held_against_a_barrier(figures: Any) -> None:
    lines = [small(1 << 10, 1.1), small(64 << 10, 1.6)]
    two, four, eight = figures.small(lines)
    assert (two.measured, eight.measured) == ("not measured", "not measured")
    assert four.met is False
    assert four.measured == "1 KiB: 1.10 (5.5 us of 5.0), 64 KiB: 1.60 (8.0 us of 5.0)"
    assert figures.small(lines[:1])[1].met is True


def test_collectives_are_never_slower_and_faster_in_the_median(figures: Any) -> None:
    lines = [collective(1 << 10, 1.0), collective(1 << 20, 1.3), collective(2 << 20, 1.3)]
    found = figures.collectives(lines)
    assert [figure.measured for figure in found[:4]] == ["not measured"] * 4
    assert found[4].met is True
    assert [figure.measured for figure in found[5:9]] == ["not measured"] * 4
    assert (found[-1].measured, found[-1].met) == ("1.30, of 3 cases", True)
    slower = figures.collectives([*lines, collective(4 << 20, 0.9), collective(8 << 20, 0.9)])
    assert slower[4].met is False
    assert (slower[-1].measured, slower[-1].met) == ("1.00, of 5 cases", False)


def test_a_peer_that_could_not_be_used_is_told(figures: Any) -> None:
    found = figures.collectives([collective(1 << 10, None, best_peer="symm_mem: no driver")])
    assert found[-1].measured == "not measured: symm_mem: no driver"


def test_buckets_have_two_goals_if_bytes_bind_them(figures: Any) -> None:
    ratio, share = figures.bucket_figures(bucket(1.31, 0.89))
    assert (ratio.met, share.met) == (True, False)
    assert ratio.measured == "1.31 (mul_)"
    (tiny,) = figures.bucket_figures(bucket(5.0, 0.1, bytes_bound=False))
    assert tiny.met is None


def test_parts_pass_fail_or_do_not_run(figures: Any) -> None:
    parts = [
        {"part": "ops", "outcome": "ok", "seconds": 3, "why": ""},
        {"part": "backend", "outcome": "failed", "seconds": 9, "why": "status 1: a test"},
        {"part": "memcheck", "outcome": "not run", "seconds": 0, "why": "no time left"},
    ]
    found = {figure.name.split(":")[0]: figure for figure in figures.verification(parts)}
    assert found["pack and unpack"].met is True
    failed = next(figure for figure in found.values() if figure.met is False)
    assert failed.measured == "FAILED (status 1: a test), 9 s"
    assert any(figure.measured == "not run: no time left" for figure in found.values())


def test_the_table_names_machine_commit_and_what_is_measured(modules: Any, tmp_path: Path) -> None:
    facts = {
        "versions": {"device": "a GPU", "torch": "2.11.0+cu130", "cuda": "13.0"},
        "nvidia-smi": ["name", "a GPU, 580.1"],
        "commit": "abc",
    }
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    text = json.dumps(row(2, 0.9))
    (tmp_path / "rows.jsonl").write_text(f"{text}\n{text[:30]}")  # cut off by a deadline
    timing = {"p50": 2.0}
    rows = [{"timings": {"nccl": timing, "dreamcomm": {"p50": 1.0}}}, {"timings": {}}]
    (tmp_path / "versus_nccl.json").write_text(json.dumps({"rows": rows}))
    modules["table"].main(tmp_path)
    table = (tmp_path / "table.md").read_text()
    label = "one GPU: all ranks share its memory; nothing here is the bandwidth of a link"
    assert f"**{label}**" in table
    assert "- device: a GPU; a GPU, 580.1" in table
    assert "- commit: abc" in table
    assert "| 2.00 in the median of 1 cases, at worst 2.00 | yes |" in table
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["label"] == label
    assert len(results["rows"]) == 1
    for program in (FOLDER / "rows.cu", FOLDER.parent / "gpu_suite.sh"):
        assert f'"{label}"' in program.read_text()


def test_probes_answer_in_json(modules: Any, tmp_path: Path) -> None:
    facts = modules["facts"]
    assert facts.run_probe("a probe", "print('noise'); print('{\"x\": [1]}')", tmp_path) == {
        "x": [1]
    }
    assert (
        facts.run_probe("broken", "raise KeyError('it')", tmp_path)["failed"][-1]
        == "KeyError: 'it'"
    )
    assert facts.run_probe("silent", "", tmp_path) == {"failed": "printed ''"}
