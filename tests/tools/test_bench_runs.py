"""``dreamcomm bench`` from flags to files, in small runs, and when results are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import dreamcomm
from dreamcomm.tools.bench import run as bench_run
from dreamcomm.tools.bench.cases import Case
from dreamcomm.tools.bench.operations import OPERATIONS
from dreamcomm.tools.bench.ranks.timing import FEWEST_SAMPLES
from dreamcomm.tools.bench.result import CaseResult, Settings
from dreamcomm.tools.bench.run import check_versus
from dreamcomm.tools.cli.commands import commands
from tools import bench_ranks

CASE = Case("all_reduce", "float32", 1024, 2, "private", True, ("dist", "core"))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--op", "all_reduse"), "unknown operation 'all_reduse'"),
        (("--sizes", "4x"), "'4x' is not a size"),
        (("--sizes", ""), "'' is not a size"),
        (("--versus", "smoke"), "the backend 'smoke' is not available"),
        (("--versus", "dreamcomm"), "dreamcomm is what is measured"),
        (("--plot", "out.gif"), "a picture ends in .png, .svg, .pdf"),
        (("--json", "nowhere/out.json"), "there is no folder"),
        (("--json", "."), ". cannot be written: Is a directory"),
        (("--json", "/proc/out.json"), "/proc/out.json cannot be written"),
    ],
)
def test_bad_flags_are_explained_before_anything_runs(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())


def test_a_missing_backend_names_those_that_are_there() -> None:
    with pytest.raises(ValueError, match=r"choose from .*gloo.*none"):
        check_versus("nonsense")


@pytest.mark.parametrize("found", [{}, {"WORLD_SIZE": "x"}, {"WORLD_SIZE": "2"}], ids=str)
def test_half_an_environment_of_a_rank_is_explained(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str]
) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "COLUMNS": "200", **found}.items():
        monkeypatch.setenv(name, value)
    done = invoke()
    assert done.exit_code == 2
    assert "unset RANK, or start the ranks by torchrun" in done.output


def test_ranks_that_run_already_have_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("COLUMNS", "200")
    done = invoke("--world", "2")
    assert done.exit_code == 2
    assert "a case asks for 2 ranks, but this process is one of 3" in done.output


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("DREAMCOMM_HEAP_BYTES", {"dreamcomm", "core"}),
        pytest.param("DREAMCOMM_SHARED_MEMORY", {"dreamcomm"}, marks=pytest.mark.long),
    ],
)
def test_what_needs_memory_that_is_not_shared_is_left_out(
    name: str, left: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, "0")
    file = str(tmp_path / "out.json")
    flags = ["--op", "all_reduce", "--sizes", "1KiB", "--placement", "private"]
    done = invoke(*flags, "--versus", "none", "--seconds", "0.01", "--json", file)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(Path(file).read_text())["rows"]
    assert set(row["timings"]) == left
    assert any("ceiling was left out" in note for note in row["notes"])


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], bytes]:
    """Every operation at one small size: output, JSON and picture."""
    folder = tmp_path_factory.mktemp("bench")
    done = invoke(
        "--sizes", "1KiB", "--seconds", "0.01",
        "--json", str(folder / "out.json"), "--plot", str(folder / "out.png"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return (
        done.output,
        json.loads((folder / "out.json").read_text()),
        (folder / "out.png").read_bytes(),
    )


@pytest.mark.beyond_gloo("measures dreamcomm")
def test_a_run_writes_what_is_needed_to_repeat_it(
    small_run: tuple[str, dict[str, Any], bytes],
) -> None:
    _, document, picture = small_run
    assert picture.startswith(b"\x89PNG")
    assert document["versions"]["torch"] == torch.__version__
    assert document["machine"]["cores"] > 0
    assert document["settings"] == {"seconds": 0.01, "versus": "gloo", "beside": 0}
    assert {"date", "commit", "units", "prediction_errors"} <= set(document)


@pytest.mark.beyond_gloo("measures dreamcomm")
def test_every_operation_is_measured_on_every_layer(
    small_run: tuple[str, dict[str, Any], bytes],
) -> None:
    rows = small_run[1]["rows"]
    found = {(row["op"], row["placement"]) for row in rows}
    assert len(rows) == len(found) == 2 * (len(OPERATIONS) - 1) + 1
    for row in rows:
        assert (row["status"], row["notes"]) == ("measured", [])
        names = ["dreamcomm", "gloo"]
        if row["op"] != "barrier":
            names = ["dreamcomm", "core", "gloo", "ceiling"]
            assert set(row["prediction"]) == {"algorithm", "seconds", "of", "error"}
        assert list(row["timings"]) == names
        for timing in row["timings"].values():
            assert timing["calls"] >= FEWEST_SAMPLES * 16
            assert 0 < timing["p50"] <= timing["p99"]


@pytest.mark.beyond_gloo("measures dreamcomm")
def test_a_run_prints_a_table_per_operation(small_run: tuple[str, dict[str, Any], bytes]) -> None:
    output = small_run[0]
    for op in OPERATIONS:
        assert f"{op}, " in output
    assert "Prediction error of the cost model" in output


@pytest.mark.long
@pytest.mark.beyond_gloo("measures dreamcomm")
def test_odd_worlds_dtypes_and_in_place() -> None:
    done = invoke(
        "--op", "all_reduce", "--op", "all_gather", "--dtype", "bfloat16", "--dtype", "int8",
        "--sizes", "1000", "--world", "3", "--in-place", "--placement", "heap",
        "--seconds", "0.001",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "all_gather, bfloat16, 3 ranks, heap tensors, in place" in done.output
    assert "996 B" in done.output


@pytest.mark.beyond_gloo("measures dreamcomm")
def test_a_wrong_result_is_told_and_not_timed() -> None:
    small, large = CASE, replace(CASE, op="broadcast")
    settings = Settings(seconds=0.001)
    wrong, right = dreamcomm.spawn(
        bench_ranks.wrong_on_last_rank, 2, args=([small, large], settings, "dreamcomm")
    )[0]
    assert wrong.status == "wrong"
    assert wrong.timings == {}
    assert wrong.notes[0].startswith("dreamcomm: rank 1, call 0, element 3: expected ")
    assert right.status == "measured"


@pytest.mark.beyond_gloo("measures dreamcomm")
def test_another_backend_that_is_wrong_is_left_out() -> None:
    (found,) = dreamcomm.spawn(
        bench_ranks.wrong_on_last_rank, 2, args=([CASE], Settings(seconds=0.001), "gloo")
    )[0]
    assert found.status == "measured"
    assert found.notes[0].startswith("gloo was left out: rank 1, call 0, element 3: expected ")
    assert list(found.timings) == ["dreamcomm", "core", "ceiling"]


def test_a_wrong_result_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [CaseResult(CASE, "wrong", ("core: rank 0",))]
    monkeypatch.setattr(bench_run, "spawn", lambda *_, **__: [wrong])
    done = invoke("--sizes", "1KiB", "--op", "all_reduce")
    assert done.exit_code == 1
    assert "1 KiB wrong: core: rank 0" in done.output
    assert "WRONG results in 1 cases" in done.output
