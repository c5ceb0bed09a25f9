"""dreamcomm.spawn leaves nothing behind, however the ranks or their parent end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from dreamcomm import RankError, spawn
from dreamcomm.launch import parent, rank_process
from helpers.census import child_ids, shared_memory_files
from launch import spawn_ranks

HANG_SECONDS = 120  # No test waits that long; a hang fails here and not in CI's limit.

SPAWN_IN_LONG = pytest.param("spawn", marks=pytest.mark.long)  # each rank imports torch
every_end = pytest.mark.parametrize(
    ("start_method", "how"),
    [
        ("spawn", "kill"),
        *(("fork", how) for how in ("return", "raise", "kill")),
        *(pytest.param("spawn", how, marks=pytest.mark.long) for how in ("return", "raise")),
    ],
)


def belongings() -> dict[str, object]:
    """All that a careless launcher would leave behind."""
    gc.collect()  # what earlier tests dropped is not for this one to lose
    return {
        "children": child_ids(os.getpid()),
        "file descriptors": set(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared memory": shared_memory_files(),
    }


@every_end
def test_nothing_is_left_behind(backend: str, start_method: str, how: str) -> None:
    def go() -> None:
        if how == "return":
            spawn(spawn_ranks.describe, 2, args=(0,), backend=backend, start_method=start_method)
            return
        with pytest.raises(RankError):
            spawn(
                spawn_ranks.leave_early,
                2,
                args=(1, how),
                backend=backend,
                start_method=start_method,
            )

    go()  # What is made once per process is made here.
    before = belongings()
    go()
    assert belongings() == before


WAITING = """
import os, signal, sys
import torch.distributed as dist
from dreamcomm import spawn

def wait_for_ever():
    os.write(1, f"{os.getpid()}\\n".encode())  # In one piece, as all ranks share the pipe.
    if dist.get_rank() == 0:
        dist.barrier()
    signal.pause()

if __name__ == "__main__":
    spawn(wait_for_ever, 2, backend=sys.argv[1], start_method=sys.argv[2])
"""


def interrupt_parent(script: subprocess.Popen[str]) -> None:
    script.send_signal(signal.SIGINT)


def interrupt_all(script: subprocess.Popen[str]) -> None:
    """As a terminal does: to everyone in the process group."""
    os.killpg(script.pid, signal.SIGINT)


def test_a_forked_rank_that_the_parent_does_not_know_of_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C comes between its start and the parent's note of it; it must not wait for ever."""
    started: list[BaseProcess] = []

    def start_and_fail(*arguments: Any) -> None:
        rank_process.start_forked(*arguments)
        started.extend(multiprocessing.active_children())
        raise KeyboardInterrupt

    monkeypatch.setattr(parent, "start_forked", start_and_fail)
    with pytest.raises(KeyboardInterrupt):
        spawn(os.getpid, 2, start_method="fork")
    [rank] = started
    rank.join(HANG_SECONDS)
    assert rank.exitcode not in (None, 0)


@pytest.mark.parametrize("start_method", [SPAWN_IN_LONG, "fork"])
@pytest.mark.parametrize(
    ("end", "status"),
    [
        (interrupt_parent, -signal.SIGINT),
        (interrupt_all, -signal.SIGINT),
        (subprocess.Popen.terminate, -signal.SIGTERM),
        (subprocess.Popen.kill, -signal.SIGKILL),
    ],
)
def test_no_rank_outlives_the_script(
    backend: str,
    start_method: str,
    end: Callable[[subprocess.Popen[str]], None],
    status: int,
    tmp_path: Path,
) -> None:
    path = tmp_path / "script.py"
    path.write_text(WAITING)
    with subprocess.Popen(
        [sys.executable, str(path), backend, start_method],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as script:
        assert script.stdout is not None
        handles = [os.pidfd_open(int(script.stdout.readline())) for _ in range(2)]
        end(script)
        assert script.wait(HANG_SECONDS) == status
        for handle in handles:
            ended, _, _ = select.select([handle], [], [], HANG_SECONDS)
            os.close(handle)
            assert ended, "a rank still runs"
