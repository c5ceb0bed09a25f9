"""dreamcomm top: what another process sees of the ranks."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dreamcomm import monitored_barrier
from dreamcomm.observe.top import snapshot
from helpers.pool import Fresh, Pool
from helpers.processes import replies

pytest.importorskip("typer")
pytestmark = pytest.mark.beyond_gloo("Gloo shows nothing")

TOP = [sys.executable, "-c", "from dreamcomm.tools.cli import app; app()", "top"]


def run_top(*arguments: str, columns: int = 160) -> str:
    env = {**os.environ, "COLUMNS": str(columns)}
    done = subprocess.run([*TOP, *arguments], capture_output=True, text=True, check=True, env=env)
    return done.stdout


def ranks_of_this_job() -> list[dict[str, Any]]:
    """The groups that this process is in, since other jobs may run."""
    found = json.loads(run_top("--json"))
    assert not [problem for problem in found["problems"] if f" {os.getpid()} " in problem]
    teams = {rank["team"] for rank in found["ranks"] if rank["pid"] == os.getpid()}
    return [rank for rank in found["ranks"] if rank["team"] in teams]


def look_while_rank_0_waits() -> list[dict[str, Any]]:
    dist.all_reduce(torch.ones(1000))
    seen: list[dict[str, Any]] = []
    if dist.get_rank() == 1:
        for _ in range(200):
            seen = ranks_of_this_job()
            if any(rank["waiting_for"] == 1 for rank in seen):
                break
            time.sleep(0.05)
    dist.broadcast(torch.ones(256), 1)
    return seen


def test_a_rank_that_waits_is_seen_with_whom_it_waits_for(fresh: Fresh) -> None:
    _, seen = fresh.run(look_while_rank_0_waits)
    assert [rank["rank"] for rank in seen] == [0, 1]
    waiting, outside = seen
    assert waiting["operation"] == "broadcast"
    assert waiting["before"] == "all_reduce"
    assert outside["before"] == ""
    assert waiting["nbytes"] == 1024
    assert waiting["inside"]
    assert waiting["waiting_for"] == 1
    assert waiting["sequence"] == outside["sequence"] + 1
    assert outside["operation"] == "all_reduce"
    assert outside["nbytes"] == 4000
    assert not outside["inside"]
    assert outside["counts"]["all_reduce"][0] == 1
    assert {rank["size"] for rank in seen} == {2}
    assert {rank["state"] for rank in seen} == {"active"}
    assert len({rank["pid"] for rank in seen}) == 2


def look_while_others_are_held_up() -> tuple[list[str], list[int], list[str]]:
    """Rank 0 calls the roll, and rank 2 is stopped."""
    rank, states = dist.get_rank(), []
    words: list[str] = []
    store = dist.distributed_c10d._get_default_store()
    if rank == 2:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1:
        pid = int(store.get("pid"))
        for _ in range(200):
            everyone = snapshot()[0]
            teams = {state.team for state in everyone if state.pid == os.getpid()}
            states = [state for state in everyone if state.team in teams]
            words = [state.doing() for state in states]
            held_up = states[0].waits_for() > 0 and words[2].endswith("(stopped)")
            if words[:1] == ["in monitored_barrier"] and held_up:
                break
            time.sleep(0.05)
        os.kill(pid, signal.SIGCONT)
    monitored_barrier()
    return words, [state.waits_for() for state in states], [state.operation for state in states]


def test_a_monitored_barrier_and_a_stopped_process_are_seen(fresh: Fresh) -> None:
    words, waits, operations = fresh.run(look_while_others_are_held_up, world=3)[1]
    nothing = "has called nothing yet"
    assert words == ["in monitored_barrier", nothing, f"{nothing} (stopped)"]
    assert waits == [1, -1, -1]  # of the absent the first
    assert operations == [""] * 3


def look_while_rank_0_receives() -> list[dict[str, Any]]:
    dist.barrier()
    data = torch.ones(5000)
    seen: list[dict[str, Any]] = []
    if dist.get_rank() == 0:
        dist.recv(data, 1)
        dist.barrier()
        return seen
    for _ in range(200):
        seen = ranks_of_this_job()
        if seen[0]["messages"]:
            break
        time.sleep(0.05)
    dist.send(data, 0)
    after = ranks_of_this_job()
    dist.barrier()
    return [seen[0], after[1]]


def test_a_rank_that_waits_for_a_message_is_seen_with_it(fresh: Fresh) -> None:
    _, (waiting, sent) = fresh.run(look_while_rank_0_receives)
    assert not waiting["inside"]
    assert waiting["messages"] == 1
    message = waiting["message"]
    assert message["operation"] == "recv"
    assert message["peer"] == 1
    assert message["nbytes"] == 20000
    assert message["seconds"] >= 0
    assert sent["messages"] == 0
    assert sent["message"] is None
    assert sent["counts"]["send"] == [1, 20000, 0]


def look_at_messages_as_a_table() -> str:
    data = torch.ones(5000)
    text = ""
    if dist.get_rank() == 0:
        works = [dist.irecv(data, 1), dist.irecv(torch.ones(7), 1)]
        text = run_top("--once")
        dist.barrier()
        for work in works:
            work.wait()
    else:
        dist.barrier()
        dist.send(data, 0)
        dist.send(torch.ones(7), 0)
    return text


def test_the_table_shows_messages(pool: Pool) -> None:
    text, _ = pool.run(look_at_messages_as_a_table)
    assert "recv from rank 1" in text
    assert "and 1 more" in text
    assert "20,000" in text


def look_after_a_failure() -> list[dict[str, Any]]:
    from dreamcomm._torch.groups import backend_of

    inner = dist.new_group(backend="dreamcomm")
    if dist.get_rank() == 0:
        backend_of(inner).abort()
    dist.barrier()
    seen = ranks_of_this_job()
    dist.barrier()
    return [rank for rank in seen if rank["state"] == "failed"]


def test_a_failed_group_is_seen_with_its_reason(fresh: Fresh) -> None:
    for seen in fresh.run(look_after_a_failure):
        assert [rank["rank"] for rank in seen] == [0]
        assert "abort() was called" in seen[0]["reason"]


def look_after_an_end(how: str) -> tuple[int, int, list[dict[str, Any]], str]:
    """Rank 0 ends or leaves, and a child that it forked, as for loading data, stays."""
    dist.all_reduce(torch.ones(1000))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        store.set("pids", f"{os.getpid()} {child}")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()
        return 0, 0, [], ""
    own, child = map(int, store.get("pids").split())
    try:
        for _ in range(200):
            seen = ranks_of_this_job()
            if seen[0]["rank"] != 0 or seen[0]["state"] != "active":
                break
            time.sleep(0.05)
        # Other jobs' groups may have long names, beside which a narrow table folds the words.
        return own, child, seen, run_top("--once", columns=1000)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_holds_a_ranks_memory_is_not_taken_for_the_rank(fresh: Fresh) -> None:
    _, rank_1 = replies(fresh.start(look_after_an_end, "killed"), 60.0)
    own, child, (ended, other), text = rank_1.value
    assert (ended["rank"], ended["state"]) == (0, "ended")
    assert ended["pid"] == own
    assert not ended["inside"]
    assert ended["waiting_for"] == -1
    assert other["state"] == "active"
    assert f"has ended (its child {child} holds its memory)" in text


def test_a_child_of_a_rank_that_has_left_is_no_rank(fresh: Fresh) -> None:
    _, (_, _, seen, _) = fresh.run(look_after_an_end, "left")
    assert [rank["rank"] for rank in seen] == [1]


APART_JOB = """
import sys, time
import torch.distributed as dist
import dreamcomm

def meet(folder):
    dist.barrier()
    open(f"{folder}/there{dist.get_rank()}", "w").close()
    while True:
        time.sleep(1)

if __name__ == "__main__":
    dreamcomm.spawn(meet, 2, args=(sys.argv[1],))
"""


def test_ranks_in_a_pid_namespace_of_their_own_are_alive(tmp_path: Path) -> None:
    """There they have other numbers than here."""
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        pytest.skip("no PID namespace can be made here")
    script = tmp_path / "job.py"
    script.write_text(APART_JOB)
    job = subprocess.Popen([*apart, sys.executable, str(script), str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / f"there{rank}").exists() for rank in range(2)):
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        seen = [one for one in snapshot()[0] if is_below(one.pid, job.pid)]
    finally:
        job.kill()
        job.wait()
    assert {one.rank for one in seen} == {0, 1}
    assert {one.state for one in seen} == {"active"}


def is_below(pid: int, above: int) -> bool:
    """Whether the process descends from the other."""
    while pid not in (0, above):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False  # it has ended, as another job's may at any time
        pid = int(stat.rpartition(") ")[2].split()[1])
    return pid == above


def look_as_a_table(columns: int) -> str:
    dist.barrier()
    text = run_top("--once", columns=columns)
    dist.barrier()
    return text


@pytest.mark.parametrize("columns", [pytest.param(20, marks=pytest.mark.long), 160])
def test_the_table_shows_each_rank(pool: Pool, columns: int) -> None:
    for text in pool.run(look_as_a_table, columns):
        assert "waits for" in text
        assert "0 of 2" in text
        assert "1 of 2" in text


def named_as_a_window() -> int:
    """Memory that can be sealed, as windows are."""
    from dreamcomm import _C

    return os.memfd_create(_C.WINDOW_LABEL, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def test_a_process_of_another_version_is_told_once() -> None:
    windows = [named_as_a_window() for _ in range(3)]
    try:
        for window in windows:
            os.write(window, bytes([1, 2, 3, 4]) * (1 << 14))
            fcntl.fcntl(window, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        problems = json.loads(run_top("--json"))["problems"]
        assert len([one for one in problems if one.startswith(f"process {os.getpid()} ")]) == 1
    finally:
        for window in windows:
            os.close(window)


def test_memory_that_is_no_ranks_harms_nothing() -> None:
    """A memory of the right name that holds anything else is not taken for a rank."""
    from dreamcomm import _C

    def own_ranks(found: dict[str, Any]) -> int:
        """Groups that other tests have made in this process are seen, too."""
        return sum(rank["pid"] == os.getpid() for rank in found["ranks"])

    before = own_ranks(json.loads(run_top("--json")))
    strange = named_as_a_window()
    try:
        os.write(strange, os.urandom(64))
        assert _C.observe_rank(f"/proc/self/fd/{strange}") is None  # too short
        os.write(strange, os.urandom(1 << 16))
        assert _C.observe_rank(f"/proc/self/fd/{strange}") is None  # it might shrink
        fcntl.fcntl(strange, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        found = json.loads(run_top("--json"))
        own = f"process {os.getpid()} runs another version"
        assert any(problem.startswith(own) for problem in found["problems"])
        assert own_ranks(found) == before
    finally:
        os.close(strange)
    assert _C.observe_rank("/proc/self/fd/0") is None
    assert _C.observe_rank("/nowhere") is None
