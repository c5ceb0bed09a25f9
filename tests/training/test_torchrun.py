"""torchrun restarts the ranks after one was killed; the run resumes and ends the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.census import child_ids
from training.models import STEPS, Mlp, adam, train_alone

WORKER = Path(__file__).with_name("elastic_worker.py")


def run(backend: str, folder: Path, kill_at: int) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    command += [str(WORKER), backend, str(folder), str(kill_at)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if backend == "gloo":  # it fails on the keys that the ranks before the restart left
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # cwd: elsewhere than the source folder, which python -m would put on the path.
    launcher = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = launcher.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        kill_tree(launcher.pid)
        output, _ = launcher.communicate()
        raise AssertionError(f"no end within 120 s:\n{output}") from None
    assert launcher.returncode == 0, output
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def kill_tree(pid: int) -> None:
    """The launcher's ranks are in sessions of their own: each process is killed by itself."""
    children = child_ids(pid)
    os.kill(pid, signal.SIGKILL)
    for child in children:
        kill_tree(child)


def test_a_killed_rank_is_replaced(backend: str, tmp_path: Path) -> None:
    killed = run(backend, tmp_path / "killed", kill_at=3)
    assert killed["restarts"] == 1
    assert killed["resumed_at"] == 3
    model = Mlp()
    alone = train_alone(model, adam(model.parameters()))
    assert len(killed["losses"]) == STEPS
    assert killed["losses"] == pytest.approx(alone, rel=1e-5)
