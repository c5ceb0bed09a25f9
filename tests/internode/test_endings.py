"""A destroyed group that spanned hosts leaves nothing behind, and the process begins anew."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from helpers.census import census, shared_memory_files
from helpers.pool import Fresh
from helpers.processes import replies, value_of
from lifecycle.groups import error_of, group_of, use_everything
from lifecycle.test_leftovers import ENDINGS

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")

PLACES = ["a,b", "a,a,b,b"]


@pytest.mark.parametrize("hosts", [pytest.param("a,b", marks=pytest.mark.long), "a,a,b,b"])
@pytest.mark.parametrize("name", ENDINGS)
def test_nothing_is_left_in_the_process(
    fresh: Fresh, tmp_path: Any, name: str, hosts: str, soak: bool
) -> None:
    if hosts != PLACES[0] and name not in ("succeed", "abort") and not soak:
        pytest.skip("only with --soak")
    files = shared_memory_files()
    world = len(hosts.split(","))
    for first, last in fresh.run(
        ENDINGS[name],
        "dreamcomm",
        str(tmp_path),
        world,
        world=world,
        group=False,
        env={"DREAMCOMM_HOSTS": hosts},
        timeout=120,
    ):
        assert last == first
        assert last.children == 0
        assert not last.shared_mappings
    assert shared_memory_files() <= files


def lose_the_last_rank(rank: int, folder: str, world: int) -> dict[str, Any]:
    """It dies; the others make a group of their own in the same processes, and count."""
    with group_of("dreamcomm", f"{folder}/warm", rank, world):
        use_everything()
    before = census()
    with group_of("dreamcomm", f"{folder}/group", rank, world, seconds=60):
        use_everything()
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        error = error_of(lambda: dist.all_reduce(torch.ones(1000)))
        seconds = time.monotonic() - begin
    after = census()
    names = os.environ["DREAMCOMM_HOSTS"].split(",")
    os.environ["DREAMCOMM_HOSTS"] = ",".join(names[:-1])
    with group_of("dreamcomm", f"{folder}/anew", rank, world - 1):
        use_everything()
    return {"error": error, "seconds": seconds, "before": before, "after": after}


@pytest.mark.parametrize(
    "hosts", ["a,b,b", pytest.param("a,b,c", marks=pytest.mark.long), "a,a,b,b"]
)
def test_those_left_begin_anew(fresh: Fresh, tmp_path: Any, hosts: str, slack: float) -> None:
    world = len(hosts.split(","))
    env = {"DREAMCOMM_HOSTS": hosts}
    ranks = fresh.start(lose_the_last_rank, str(tmp_path), world, world=world, group=False, env=env)
    for reply in replies(ranks, timeout=90)[:-1]:
        assert reply.error is None, reply.error
        told = reply.value
        assert f"rank {world - 1}" in told["error"], told
        assert told["before"] == told["after"]
        assert told["seconds"] < 2 + slack, told


def abort_from_another_thread(rank: int, folder: str, world: int) -> list[Any]:
    """While all ranks but one wait in a call that it never makes: as a watchdog would do."""
    with group_of("dreamcomm", f"{folder}/warm", rank, world):
        use_everything()
    before = census()
    found: list[Any] = []
    for number in range(3):
        with group_of("dreamcomm", f"{folder}/{number}", rank, world, seconds=60):
            use_everything()
            if rank == world - 1:
                error = error_of(lambda: dist.recv(torch.ones(1), 0))
            else:
                aborter = threading.Timer(0.3, cast(Any, dist.group.WORLD).abort)
                aborter.start()
                error = error_of(lambda: dist.all_reduce(torch.ones(1000)))
                aborter.join()
                del aborter  # which holds the group
        found.append(error)
    end = time.monotonic() + 10  # Gloo closes a connection on a thread of its own
    while census() != before and time.monotonic() < end:
        time.sleep(0.05)
    return [*found, before, census()]


@pytest.mark.parametrize("hosts", PLACES)
def test_an_abort_releases_who_waits_for_another_host(
    fresh: Fresh, tmp_path: Any, hosts: str
) -> None:
    world = len(hosts.split(","))
    begin = time.monotonic()
    for found in fresh.run(
        abort_from_another_thread,
        str(tmp_path),
        world,
        world=world,
        group=False,
        env={"DREAMCOMM_HOSTS": hosts},
    ):
        *texts, first, last = found
        assert all(text.startswith("DistBackendError") for text in texts), texts
        assert first == last
    assert time.monotonic() - begin < 50  # and not the timeout


def make_and_drop(rank: int, folder: str, world: int) -> None:
    """Groups that end as soon as they are made: while others may still connect."""
    with group_of("dreamcomm", f"{folder}/store", rank, world):
        for _ in range(40):
            groups: list[Any] = [dist.new_group([r, r + 2]) for r in (0, 1)]
            own = groups[rank % 2]
            del groups
            dist.destroy_process_group(own)
            del own


def test_a_group_may_end_as_soon_as_it_is_made(fresh: Fresh, tmp_path: Any) -> None:
    fresh.run(
        make_and_drop,
        str(tmp_path),
        4,
        world=4,
        group=False,
        env={"DREAMCOMM_HOSTS": "a,a,b,b"},
    )


def give_up(told_by: str) -> None:
    """And stay, with all connections."""
    cast(Any, dist.group.WORLD).abort()
    dist.distributed_c10d._get_default_store().wait([told_by])


WAITS: dict[str, Any] = {
    "recv": lambda peer: dist.recv(torch.ones(10), peer),
    "recv from any source": lambda peer: dist.recv(torch.ones(10)),
    "send": lambda peer: dist.send(torch.ones(100_000), peer),
}


def wait_for_one_that_has_given_up(name: str) -> str:
    """All ranks but the first abort the group, and stay."""
    use_everything()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() > 0:
        give_up("told")
        return ""
    error = error_of(lambda: WAITS[name](dist.get_world_size() - 1))
    store.set("told", "")
    return error


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("hosts", [pytest.param("a,b", marks=pytest.mark.long), "a,a,b,b"])
def test_a_message_is_not_waited_for_when_its_rank_has_given_up(
    fresh: Fresh, hosts: str, name: str, slack: float
) -> None:
    world = len(hosts.split(","))
    begin = time.monotonic()
    ranks = fresh.start(
        wait_for_one_that_has_given_up,
        name,
        world=world,
        group_timeout=60,
        env={"DREAMCOMM_HOSTS": hosts},
    )
    told = str(value_of(replies(ranks, timeout=90), 0))
    assert f"rank {world - 1} has aborted the group: abort() was called" in told, told
    assert time.monotonic() - begin < 20 + slack


def wait_for_one_of_this_host(aborted: list[int]) -> str:
    """The first rank waits for the second, while those of the other host abort the group."""
    use_everything()
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    if rank in aborted:
        give_up("told")
    elif rank > 0:
        store.wait(["told"])
    else:
        error = error_of(lambda: dist.all_reduce(torch.ones(1000)))
        store.set("told", "")
        return error
    return ""


@pytest.mark.parametrize("aborted", [[2, 3], [3]])
def test_a_late_rank_is_not_waited_for_when_one_elsewhere_has_given_up(
    fresh: Fresh, aborted: list[int], slack: float
) -> None:
    begin = time.monotonic()
    ranks = fresh.start(
        wait_for_one_of_this_host,
        aborted,
        world=4,
        group_timeout=60,
        env={"DREAMCOMM_HOSTS": "a,a,b,b"},
    )
    told = str(value_of(replies(ranks, timeout=90), 0))
    assert f"rank {aborted[0]} has aborted the group: abort() was called" in told, told
    assert "rank 0 waits for rank 1" in told, told
    assert time.monotonic() - begin < 20 + slack
