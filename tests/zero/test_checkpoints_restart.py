"""torchrun restarts the ranks after one was killed; a sharded optimizer resumes with equal bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.pool import Pool
from training.test_torchrun import kill_tree
from zero.checkpoints import build, train

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

WORKER = Path(__file__).with_name("resuming_worker.py")
STEPS = 6


def run(folder: Path, kill_at: int, how: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    command += [str(WORKER), str(folder), str(kill_at), how]
    # cwd: elsewhere than the source folder, which python -m would put on the path.
    launcher = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
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


def uninterrupted(how: str) -> list[float]:
    return train(*build("odd", "adamw", how), range(STEPS))


@pytest.mark.long  # a killed rank of torchrun is replaced in training/, too
@pytest.mark.parametrize("how", ["2"])
def test_a_killed_rank_is_replaced(pool: Pool, tmp_path: Path, how: str) -> None:
    killed = run(tmp_path, 3, how)
    assert (killed["restarts"], killed["resumed_at"]) == (1, 3)
    expected = pool.run(uninterrupted, how)
    assert [list(of_rank) for of_rank in zip(*killed["losses"], strict=True)] == expected
