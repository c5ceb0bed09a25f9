"""dreamcomm.spawn: results by rank, errors that name the rank, and the ways to start."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamcomm import RankError, spawn
from dreamcomm.launch import parent
from dreamcomm.launch.rank_process import start_forked
from launch import spawn_ranks

HANG_SECONDS = 120  # No test waits that long; a hang fails here and not in CI's limit.

both_methods = pytest.mark.parametrize("start_method", ["spawn", "fork"])
# Each rank of "spawn" imports torch: what the other tests show of it is shown by a few.
both_methods_in_long = pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.long), "fork"]
)


@both_methods
def test_results_come_by_rank(backend: str, start_method: str) -> None:
    results = spawn(
        spawn_ranks.describe,
        3,
        args=(5,),
        kwargs={"scale": 2},
        backend=backend,
        start_method=start_method,
    )
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert [world for _, world, _ in results] == [3, 3, 3]
    for _, _, total in results:
        assert torch.equal(total, torch.full((3,), 36.0))


@both_methods_in_long
def test_one_rank_is_a_world(backend: str, start_method: str) -> None:
    ((rank, world, _),) = spawn(
        spawn_ranks.describe, 1, args=(0,), backend=backend, start_method=start_method
    )
    assert (rank, world) == (0, 1)


@both_methods_in_long
def test_ranks_get_the_environment_of_torchrun(start_method: str) -> None:
    before = dict(os.environ)
    first, second = spawn(spawn_ranks.environment, 2, init=False, start_method=start_method)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    for variables in (first, second):
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "2"
        assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert dict(os.environ) == before


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert (
        spawn(spawn_ranks.threads, 2, init=False, start_method="spawn") == [max(1, cores // 2)] * 2
    )


def test_the_users_thread_count_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # One rank alone would get every core.
    assert spawn(spawn_ranks.threads, 1, init=False, start_method="spawn") == [1]


@both_methods_in_long
def test_init_false_leaves_the_group_to_the_function(start_method: str) -> None:
    assert spawn(spawn_ranks.initialised, 2, init=False, start_method=start_method) == [False] * 2


def test_each_rank_gets_its_own_copy_of_the_arguments(backend: str) -> None:
    mine: list[int] = []
    results = spawn(spawn_ranks.change, 2, args=(mine,), backend=backend, start_method="fork")
    assert (mine, results) == ([], [[0], [1]])


@pytest.mark.beyond_gloo("a second group on one store may read the first one's addresses")
def test_a_group_can_be_made_anew_from_the_environment(backend: str) -> None:
    assert spawn(
        spawn_ranks.init_twice, 2, args=(backend,), backend=backend, start_method="spawn"
    ) == [2.0, 2.0]


def test_a_timeout_in_seconds_reaches_the_group(backend: str) -> None:
    results = spawn(
        spawn_ranks.describe, 2, args=(0,), backend=backend, timeout=30, start_method="fork"
    )
    assert [rank for rank, _, _ in results] == [0, 1]


@both_methods
def test_an_exception_names_the_rank_and_shows_its_traceback(
    backend: str, start_method: str
) -> None:
    with pytest.raises(RankError, match=r"^rank 1 raised:") as caught:
        spawn(
            spawn_ranks.leave_early,
            2,
            args=(1, "raise"),
            backend=backend,
            start_method=start_method,
        )
    assert caught.value.rank == 1
    assert caught.value.signal is None
    assert caught.value.traceback is not None
    assert "ValueError: no such fruit: käse" in str(caught.value)
    assert "in leave_early" in caught.value.traceback
    assert "rank_main" not in caught.value.traceback


@both_methods_in_long
def test_a_killed_rank_is_named_with_its_signal(backend: str, start_method: str) -> None:
    with pytest.raises(RankError, match=r"^rank 2 was killed by SIGKILL") as caught:
        spawn(
            spawn_ranks.leave_early, 3, args=(2, "kill"), backend=backend, start_method=start_method
        )
    assert (caught.value.rank, caught.value.signal) == (2, signal.SIGKILL)


def die_of(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "name"), [(40, r"signal 40 \(SIGRTMIN\+6\)"), (64, "SIGRTMAX")])
def test_a_signal_that_python_has_no_name_for_is_told(number: int, name: str) -> None:
    with pytest.raises(RankError, match=f"^rank 0 was killed by {name}$") as caught:
        spawn(die_of, 1, args=(number,), init=False, start_method="fork")
    assert caught.value.signal == number


@both_methods_in_long
def test_a_rank_that_exits_is_named_with_its_code(backend: str, start_method: str) -> None:
    with pytest.raises(RankError, match="rank 0 ended with exit code 3"):
        spawn(
            spawn_ranks.leave_early, 1, args=(0, "exit"), backend=backend, start_method=start_method
        )


def test_a_crash_after_the_return_is_an_error_too() -> None:
    with pytest.raises(RankError, match="rank 0 was killed by SIGSEGV"):
        spawn(spawn_ranks.crash_after_return, 1, init=False, start_method="spawn")


def test_a_result_that_cannot_travel_is_named() -> None:
    with pytest.raises(RankError, match=r"return value \(a function\) cannot be pickled"):
        spawn(spawn_ranks.unpicklable, 1, init=False, start_method="fork")


def test_a_function_that_cannot_travel_is_refused_before_the_start() -> None:
    with pytest.raises(TypeError, match="module-level function"):
        spawn(lambda: None, 2, start_method="spawn")


def test_a_forked_rank_takes_any_function() -> None:
    assert spawn(lambda: 7, 2, init=False, start_method="fork") == [7, 7]


@pytest.mark.parametrize(
    ("nprocs", "start_method", "text"),
    [(0, "fork", "nprocs must be 1 or more, got 0"), (1, "thread", "got 'thread'")],
)
def test_bad_arguments_are_named(nprocs: int, start_method: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        spawn(spawn_ranks.threads, nprocs, start_method=start_method)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fn": None}, "fn must be a function"),
        ({"nprocs": True}, "nprocs must be an int"),
        ({"nprocs": "2"}, "nprocs must be an int"),
        ({"args": "ab"}, "args must be a tuple"),
        ({"kwargs": [1]}, "kwargs must be a dict"),
        ({"timeout": 0}, "timeout must be a positive"),
        ({"timeout": "5"}, "timeout must be a positive"),
        ({"timeout": float("nan")}, "timeout must be a positive"),
        ({"timeout": float("inf")}, "timeout must be a positive"),
    ],
)
def test_what_could_only_fail_in_the_ranks_is_refused_before(
    arguments: dict[str, Any], text: str
) -> None:
    call: dict[str, Any] = {"fn": spawn_ranks.threads, "nprocs": 1, **arguments}
    with pytest.raises((TypeError, ValueError), match=text):
        spawn(call.pop("fn"), call.pop("nprocs"), **call)


@pytest.mark.parametrize("timeout", [timedelta.max, 1e300])
def test_the_longest_timeout_is_for_ever(timeout: timedelta | float) -> None:
    results = spawn(spawn_ranks.describe, 2, args=(0,), timeout=timeout, start_method="fork")
    assert [total[0].item() for _, _, total in results] == [1.0, 1.0]


def run_python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@both_methods_in_long
@pytest.mark.parametrize("error", [pytest.param(errno.EPERM, marks=pytest.mark.long), errno.ENOSYS])
def test_ranks_run_and_fail_the_same_where_no_pidfd_is_given(error: int, start_method: str) -> None:
    """Threads wait for them, and are gone as well."""
    program = (
        "import threading; from launch import spawn_ranks; from helpers.seccomp import refuse\n"
        "from dreamcomm import RankError, spawn\n"
        f"refuse('pidfd_open', {error})\n"
        f"how = dict(start_method='{start_method}')\n"
        "print([rank for rank, _, _ in spawn(spawn_ranks.describe, 2, args=(0,), **how)])\n"
        "try:\n"
        "    spawn(spawn_ranks.leave_early, 3, args=(2, 'kill'), **how)\n"
        "except RankError as error:\n"
        "    print(str(error).splitlines()[0])\n"
        "print([thread for thread in threading.enumerate() if 'dreamcomm' in thread.name])\n"
    )
    done = run_python("-c", program, cwd=Path(__file__).parents[1])
    assert done.stdout == "[0, 1]\nrank 2 was killed by SIGKILL\n[]\n", done.stderr


def test_forked_ranks_begin_when_all_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one is forked while the store's thread, which it does not have, holds a lock."""
    forked = []

    def start(*args: Any) -> Any:
        process = start_forked(*args)
        forked.append(time.monotonic())
        return process

    monkeypatch.setattr(parent, "start_forked", start)
    begun = spawn(time.monotonic, 4, init=False, start_method="fork")
    assert min(begun) > max(forked)


def test_a_prompt_or_notebook_gets_forked_ranks() -> None:
    """There ``__main__`` has no file, and a function typed in exists nowhere else."""
    program = (
        "from dreamcomm import spawn\n"
        "def typed_in(x):\n"
        "    return x + 1\n"
        "print(spawn(typed_in, 2, args=(1,), init=False))\n"
    )
    done = run_python("-c", program)
    assert done.stdout == "[2, 2]\n", done.stderr
    assert done.stderr == ""


def test_a_script_gets_fresh_ranks(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import os\n"
        "from dreamcomm import spawn\n"
        "def name():\n"
        "    return __name__\n"
        "if __name__ == '__main__':\n"
        "    print(spawn(name, 2, init=False))\n"
    )
    done = run_python(str(path))
    assert done.stdout == "['__mp_main__', '__mp_main__']\n", done.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("from dreamcomm import spawn\nprint(spawn(int, 2, init=False))\n")
    done = run_python(str(path))
    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr
