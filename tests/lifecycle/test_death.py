"""A rank is killed: the others are told whom they lost, and nothing of it stays."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import dreamcomm
from helpers.census import census, shared_memory_files
from helpers.pool import Fresh
from helpers.processes import replies, value_of
from lifecycle.groups import Deadly, error_of, use_everything

VICTIM = 1


def wait_async() -> None:
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
    for work in works:
        assert work is not None
        work.wait()


CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1000)),
    "barrier": dist.barrier,
    "recv": lambda: dist.recv(torch.ones(10), VICTIM),
    "asynchronous": wait_async,
    "large": lambda: dist.all_reduce(torch.ones(5_000_000)),
}


def lose_a_rank(name: str) -> dict[str, Any]:
    use_everything()
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(CALLS[name])
    again = error_of(lambda: dist.all_reduce(torch.ones(1)))
    dist.destroy_process_group()
    return {"error": error, "again": again, "mappings": census().shared_mappings}


@pytest.mark.beyond_gloo("gloo names no rank")
@pytest.mark.parametrize("name", CALLS)
def test_survivors_learn_who_died(fresh: Fresh, name: str) -> None:
    files = shared_memory_files()
    found = replies(fresh.start(lose_a_rank, name, world=3, group_timeout=300), timeout=60)
    assert "process ended with -9" in str(found[VICTIM].error)
    for rank in (0, 2):
        assert found[rank].error is None, found[rank].error
        told = found[rank].value
        assert told["error"].startswith("DistBackendError")
        assert f"rank {VICTIM} last called" in told["error"]
        assert told["error"].endswith("(Connection closed by peer)")  # what Gloo says
        assert told["again"].startswith("DistBackendError")
        assert not told["mappings"]
    assert shared_memory_files() <= files


def appears(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def leave_while_another_is_late(name: str, folder: str) -> str:
    """Rank 1 leaves; rank 0 calls when rank 2, which waits for both, has its error."""
    use_everything()
    told = Path(folder, "told")
    if dist.get_rank() == VICTIM:
        dist.destroy_process_group()
        return "left"
    if dist.get_rank() == 0:
        appears(told)
    error = error_of(CALLS[name])
    told.touch()
    return error


@pytest.mark.beyond_gloo("gloo names no rank")
@pytest.mark.parametrize("name", ["all_reduce", "barrier", "asynchronous", "large"])
def test_a_rank_that_leaves_is_told_of_while_another_is_late(
    fresh: Fresh, tmp_path: Path, name: str
) -> None:
    arguments = (name, str(tmp_path))
    ranks = fresh.start(leave_while_another_is_late, *arguments, world=3, group_timeout=30)
    found = replies(ranks, timeout=60)
    assert found[VICTIM].value == "left"
    assert "cannot finish: rank 1 has left the group" in found[2].value, found[2].value
    assert found[2].value.endswith("(Connection closed by peer)"), found[2].value
    assert found[0].value.startswith("DistBackendError"), found[0].value


def leave_in_time(folder: str) -> str:
    """Rank 1 has done its part, and leaves, while rank 0 waits for a message of rank 2."""
    use_everything()
    rank = dist.get_rank()
    left = Path(folder, "left")
    if rank == 0:
        dist.recv(torch.ones(10), 2)
    if rank == 2:
        appears(left)
        time.sleep(0.3)  # in which rank 0 looks at all ranks
        dist.send(torch.ones(10), 0)
    dist.destroy_process_group()
    if rank == VICTIM:
        left.touch()
    return "no error"


def test_a_rank_that_leaves_in_time_is_no_loss(fresh: Fresh, tmp_path: Path) -> None:
    found = replies(fresh.start(leave_in_time, str(tmp_path), world=3), timeout=60)
    assert [reply.value for reply in found] == ["no error"] * 3


def receive_from_any_when_one_has_left() -> str:
    """Rank 1 leaves; rank 0 aborts the group for that, and lives on."""
    use_everything()
    rank = dist.get_rank()
    text = "left"
    if rank == 0:
        text = error_of(lambda: dist.all_reduce(torch.ones(10)))
    if rank == 2:
        text = error_of(lambda: dist.recv(torch.ones(10)))
        dist.distributed_c10d._get_default_store().set("told", "")
    if rank == VICTIM:
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        store.wait(["told"])
    if rank == 0:
        dist.distributed_c10d._get_default_store().wait(["told"])
    return text


@pytest.mark.beyond_gloo("gloo names no rank")
def test_a_receive_from_any_source_says_why_nobody_can_send(fresh: Fresh) -> None:
    ranks = fresh.start(receive_from_any_when_one_has_left, world=3, group_timeout=30)
    found = [reply.value for reply in replies(ranks, timeout=60)]
    assert "no other rank can send it: rank 0 has aborted the group" in found[2], found
    assert "; rank 1 has left the group (" in found[2], found


def receive_from_any_when_all_are_gone() -> str:
    """Ranks 1 and 3 are killed, and rank 2 leaves."""
    use_everything()
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        text = error_of(lambda: dist.recv(torch.ones(10)))
        store.set("told", "")
        return text
    if rank != 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    store.wait(["told"])
    return "left"


@pytest.mark.beyond_gloo("gloo names no rank")
@pytest.mark.parametrize("hosts", ["a,a,a,a", "a,b,a,b", "a,a,a,b"])
def test_a_receive_from_any_source_tells_of_every_rank_once(fresh: Fresh, hosts: str) -> None:
    ranks = fresh.start(
        receive_from_any_when_all_are_gone, world=4, group_timeout=30, options={"hosts": hosts}
    )
    text = str(value_of(replies(ranks, timeout=60), 0))
    words, listed = text.split("no other rank can send it: ")
    assert "any" in words, text
    fates = listed.split("; ")
    assert len(fates) == 3, text
    for rank in (1, 2, 3):
        assert sum(f"rank {rank} " in fate for fate in fates) == 1, text
    near = [rank for rank in (1, 2, 3) if hosts.split(",")[rank] == "a"]
    for rank in near:
        fate = "rank 2 has left the group" if rank == 2 else f"the process of rank {rank} has ended"
        assert any(one.startswith(fate) for one in fates), text


def lose_a_rank_in_new_group(members: list[int], how: str) -> dict[str, Any]:
    """The new group has to find out by itself."""
    use_everything()
    if dist.get_rank() == 2:
        if how == "leaves":  # as a process does at its exit
            dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).shutdown()
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() not in members:
        return {}
    if how == "is mourned":  # the default group knows of it, and is of no use any more
        error_of(dist.barrier)
    return {"error": error_of(lambda: dist.new_group(members, use_local_synchronization=True))}


@pytest.mark.beyond_gloo("gloo names no rank")
@pytest.mark.parametrize("members", [[0, 1, 2], [1, 2]], ids=str)
@pytest.mark.parametrize("how", ["is killed", "leaves", "is mourned"])
def test_a_rank_that_dies_before_a_new_group_is_made(
    fresh: Fresh, members: list[int], how: str
) -> None:
    ranks = fresh.start(lose_a_rank_in_new_group, members, how, world=3, group_timeout=300)
    found = replies(ranks, timeout=60)
    assert "process ended with -9" in str(found[2].error)
    for rank in set(members) - {2}:
        assert found[rank].error is None, found[rank].error
        error = found[rank].value["error"]
        assert error.startswith("DistBackendError"), error
        assert f"the process of rank {members.index(2)} has ended" in error
        numbers = f" (ranks {', '.join(map(str, members))} of the job)"
        if members == list(range(len(members))):
            numbers = ""
        assert re.search(rf"setting up group '\w+'{re.escape(numbers)} on rank", error), error


def make_a_group_that_loses_a_rank(rank: int, path: str, last: str) -> list[str]:
    store: dist.Store = dist.FileStore(path, 3)
    if rank == VICTIM:
        store = Deadly(store, last, signal.SIGKILL)
    made = error_of(
        lambda: dist.init_process_group(
            "dreamcomm", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=300)
        )
    )
    return [made, error_of(dist.barrier)] if made == "no error" else [made]


@pytest.mark.beyond_gloo("gloo names no rank")
@pytest.mark.parametrize("step", ["dial", "outcome"])
def test_a_rank_that_dies_while_a_group_is_made(fresh: Fresh, tmp_path: Path, step: str) -> None:
    """When all know the outcome the group is made, and its first call fails."""
    arguments = (str(tmp_path / "store"), f"{step}/{VICTIM}")
    ranks = fresh.start(make_a_group_that_loses_a_rank, *arguments, world=3, group=False)
    found = replies(ranks, timeout=60)
    assert "process ended with -9" in str(found[VICTIM].error)
    for rank in (0, 2):
        assert found[rank].error is None, found[rank].error
        told = found[rank].value
        assert len(told) == (1 if step == "dial" else 2)
        assert told[-1].startswith("DistBackendError"), told
        # "has ended", or where nothing of its process is left to look at, "has hung up".
        assert re.search(rf"rank {VICTIM} has (ended|hung up)", told[-1]), told


def split_a_merged_group(folder: str) -> list[str]:
    """Rank 0 of the job ends; it has nothing to do with rank 0 of what the others merge."""
    rank = dist.get_rank()
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.barrier()
    if rank == 0:
        os._exit(0)
    patience = timedelta(seconds=60)
    store = dist.FileStore(str(Path(folder) / "merged"), 2)
    together: Any = cast(Any, alone).merge_remote_group(store, 2, patience, "together")
    if together.rank() == 0:
        time.sleep(1)  # in which the other one has looked who has died
    parts: list[Any] = []
    split = error_of(lambda: parts.append(together.split_group([0, 1], patience, None, "part")))
    summed = [error_of(lambda part=part: part.allreduce([torch.ones(1)]).wait()) for part in parts]
    return [split, *summed]


@pytest.mark.beyond_gloo("gloo merges no groups")
def test_a_merged_group_has_ranks_of_its_own(fresh: Fresh, tmp_path: Path) -> None:
    ranks = fresh.start(split_a_merged_group, str(tmp_path), world=3, group_timeout=60)
    found = replies(ranks, timeout=60)
    for rank in (1, 2):
        assert found[rank].error is None, found[rank].error
        assert found[rank].value == ["no error", "no error"]


def die_midway() -> str:
    """Large operations one after another; the victim ends somewhere inside of one."""
    data = torch.ones(2_000_000)
    use_everything()
    if dist.get_rank() == VICTIM:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, from inside of C++
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    while True:
        error = error_of(lambda: dist.all_reduce(data))
        if error != "no error":
            return error


@pytest.mark.beyond_gloo("gloo names no rank")
def test_a_rank_that_dies_inside_of_a_collective(fresh: Fresh) -> None:
    found = replies(fresh.start(die_midway, world=3, group_timeout=300), timeout=60)
    for rank in (0, 2):
        assert found[rank].error is None, found[rank].error
        assert found[rank].value.startswith("DistBackendError")
        assert f"rank {VICTIM}" in found[rank].value


def die_while_another_is_late(told: str) -> tuple[str, float]:
    """Rank 0 dies inside of the call that rank 1 has not made yet, and for which rank 2 waits."""
    dist.barrier()
    if dist.get_rank() == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    deadline = time.monotonic() + 20
    while dist.get_rank() == 1 and not Path(told).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    begin = time.monotonic()
    text = error_of(lambda: dist.all_reduce(torch.ones(3)))
    Path(told).touch()
    return text, time.monotonic() - begin


@pytest.mark.beyond_gloo("gloo names no rank")
def test_a_death_is_told_while_another_rank_is_late(
    fresh: Fresh, tmp_path: Path, slack: float
) -> None:
    ranks = fresh.start(
        die_while_another_is_late, str(tmp_path / "told"), world=3, group_timeout=300
    )
    found = replies(ranks, timeout=60)
    for rank in (1, 2):
        assert found[rank].error is None, found[rank].error
        text, seconds = found[rank].value
        assert "the process of rank 0 has ended" in text, text
        assert seconds < 0.3 + 1 + slack


def stay(folder: str) -> None:
    """Says that it is inside of the group, then waits for a peer that never calls."""
    use_everything()
    Path(folder, f"ready-{dist.get_rank()}").touch()
    dist.barrier()
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def test_all_ranks_killed_at_once_leave_no_file(fresh: Fresh, tmp_path: Path) -> None:
    files = shared_memory_files()
    ranks = fresh.start(stay, str(tmp_path))
    while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
        assert all(process.process.is_alive() for process in ranks), ranks[0].output()
    for process in ranks:
        process.kill()
    assert shared_memory_files() <= files


def come_late_to_the_first() -> str:
    """Rank 1 dies, and the others end two monitored barriers before the last one comes."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    use_everything()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        store.wait(["ended"], timedelta(seconds=30))
    text = error_of(dreamcomm.monitored_barrier)
    if rank == 0:
        error_of(dreamcomm.monitored_barrier)
        store.set("ended", "")
    return text


@pytest.mark.beyond_gloo("gloo knows no verdict")
def test_who_comes_late_to_a_monitored_barrier_learns_who_died(fresh: Fresh) -> None:
    ranks = fresh.start(come_late_to_the_first, world=4, group_timeout=60)
    told = str(value_of(replies(ranks, 60), 3))
    assert "came too late: rank 0 has ended it without this rank, and others since" in told, told
    assert "the process of rank 1 has ended" in told, told
    assert "give a longer timeout" not in told, told
