"""How the GPU suite starts NVIDIA's multi-process service, with a program that stands for it."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
DAEMON = """#!/bin/sh
echo "$* $(cat)" >>{diary}
test "$1" = -d && touch {running}
if ! test -e {running}; then echo "Cannot find MPS control daemon process"; exit 1; fi
echo 123
"""


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    module: Any = importlib.import_module("mps")
    monkeypatch.delitem(sys.modules, "mps")
    for variable in module.FOLDERS:
        monkeypatch.delenv(variable, raising=False)
    return module


@pytest.fixture
def diary(mps: Any, tmp_path: Path) -> Path:
    """What the daemon was asked, a line each."""
    path = tmp_path / "diary"
    daemon = tmp_path / mps.CONTROL
    daemon.write_text(DAEMON.format(diary=path, running=tmp_path / "running"))
    daemon.chmod(0o755)
    return path


def test_without_it_processes_take_turns(mps: Any, tmp_path: Path) -> None:
    with mps.multi_process_service(tmp_path) as words:
        assert words == f"processes take turns (no MPS: {mps.CONTROL} is not installed)"


def test_it_is_started_for_the_ranks_and_stopped(
    mps: Any, diary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "try_a_process", lambda: None)
    with mps.multi_process_service(tmp_path / "folder") as words:
        assert words == mps.RUNS
        assert Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    asked = [line.strip() for line in diary.read_text().splitlines()]
    assert asked == ["get_server_list", "-d", "quit -t 5"]


def test_where_no_process_can_use_it_it_is_stopped_before_the_ranks(
    mps: Any, diary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "try_a_process", lambda: "no such device")
    with mps.multi_process_service(tmp_path / "folder") as words:
        assert words == "processes take turns (no MPS: no such device)"
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
        assert diary.read_text().strip().endswith("quit -t 5")
    assert diary.read_text().count("quit") == 1


def test_one_that_runs_already_is_left_as_it_is(
    mps: Any, diary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "running").touch()
    monkeypatch.setattr(mps, "try_a_process", lambda: None)
    with mps.multi_process_service(tmp_path / "folder") as words:
        assert words == mps.RUNS
    assert "quit" not in diary.read_text()
