"""``dreamcomm bench --beside``: busy processes run all the time, and end with the benchmark."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dreamcomm.tools.bench import machine, plot
from dreamcomm.tools.bench.busy import BusyProcessError, busy_processes
from dreamcomm.tools.bench.result import Run, Settings
from dreamcomm.tools.bench.run import busy_here
from dreamcomm.tools.cli.commands import commands
from helpers.census import child_ids

PARENT = """
import os, signal
from dreamcomm.tools.bench.busy import busy_processes

with busy_processes(1) as found:
    print(*found, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_busy_processes_end_with_the_block(error: type[BaseException]) -> None:
    before = child_ids(os.getpid())

    def fail_beside() -> None:
        with busy_processes(2) as found:
            assert child_ids(os.getpid()) == before | set(found)
            raise error

    with pytest.raises(error):
        fail_beside()
    assert child_ids(os.getpid()) == before


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_busy_processes_end_with_their_parent(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        end = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(number)
        assert select.select([end], [], [], 60)[0]
        os.close(end)


def test_a_busy_process_that_ends_early_is_an_error() -> None:
    def kill_one() -> None:
        with busy_processes(1) as found:
            end = os.pidfd_open(found[0])
            os.kill(found[0], signal.SIGKILL)
            select.select([end], [], [])
            os.close(end)

    with pytest.raises(BusyProcessError, match="ended during the run, with exit code -9"):
        kill_one()


def test_one_rank_of_a_machine_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert busy_here(3) == 3
    ranks = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert busy_here(3) == 0
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert busy_here(3) == 3


def test_the_picture_names_them() -> None:
    here = machine.Machine("Fast", 4, 1)
    run = Run("", here, machine.these_versions(), None, Settings(beside=2), ())
    assert plot.title_of(run).endswith("Fast, 4 cores, beside 2 busy processes")
    assert plot.title_of(replace(run, settings=Settings())).endswith("Fast, 4 cores")


@pytest.mark.beyond_gloo("measures dreamcomm")
def test_report_and_figures_name_them(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ["--op", "barrier", "--seconds", "0.001", "--beside", "1", "--json", str(file)]
    done = CliRunner().invoke(commands, ["bench", *flags])
    assert done.exit_code == 0, done.output
    assert "Measured beside 1 busy process." in done.output
    assert json.loads(file.read_text())["settings"]["beside"] == 1
