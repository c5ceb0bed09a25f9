"""Hosts that cannot reach each other when a group is made, or hardly."""

from __future__ import annotations

import os
import re
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helpers.pool import Fresh
from helpers.processes import replies
from internode.network import Network, NoNetwork, enter
from lifecycle.groups import Deadly, end_of, error_of

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")


def connect_in_vain(rank: int, network: list[str], path: str) -> tuple[str, float]:
    """A rank on each host."""
    enter(network[rank])
    return end_of(
        lambda: dist.init_process_group(
            "dreamcomm", store=dist.FileStore(path, 2), rank=rank, world_size=2
        )
    )


def test_hosts_that_cannot_connect(fresh: Fresh, tmp_path: Path, slack: float) -> None:
    try:
        with Network(2) as network:
            network.cut(1)
            ranks = fresh.start(
                connect_in_vain, network.hosts, str(tmp_path / "store"), world=2, group=False
            )
            found = [reply.value for reply in replies(ranks, 60)]
    except NoNetwork as why:
        pytest.skip(str(why))
    for text, seconds in found:  # one finds out, and tells the other
        assert seconds < 2.0 + slack
        for words in ("could not connect with the ranks of other hosts", "unreachable"):
            assert words in text, text
    assert any("rank 1 of 2" in text for text, _ in found), found


def connect_until_interrupted(rank: int, port: int) -> tuple[str, float]:
    """Rank 1 stops once it has told where it can be reached, and rank 0's user loses patience."""
    store: dist.Store = dist.TCPStore("127.0.0.1", port, 3, False)
    if rank == 1:
        store = Deadly(store, "between/dreamcomm/gloo/0/1", signal.SIGSTOP)
    if rank == 0:
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    return end_of(
        lambda: dist.init_process_group("dreamcomm", store=store, rank=rank, world_size=3)
    )


def test_ctrl_c_ends_the_wait_for_a_host_on_all(fresh: Fresh, slack: float) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
    env = {"DREAMCOMM_HOSTS": "a,b,c"}
    ranks = fresh.start(connect_until_interrupted, store.port, world=3, group=False, env=env)
    found = replies([ranks[0], ranks[2]], 60)
    for reply in found:
        assert reply.error is None, reply.error
    (own, seconds), (told, after) = (reply.value for reply in found)
    assert own == "interrupted"
    assert seconds < 4.0 + slack
    assert "rank 0 has aborted the group: it was interrupted" in told, told
    assert after < 4.0 + slack, told


def join(rank: int, network: list[str], path: str, env: list[dict[str, str]]) -> str:
    """Makes a group, each rank in an environment of its own; returns what went wrong."""
    enter(network[rank])
    os.environ.update(env[rank])
    timeout = timedelta(seconds=1)  # a group is waited for longer
    store = dist.FileStore(path, 2)
    return error_of(
        lambda: dist.init_process_group(
            "dreamcomm", store=store, rank=rank, world_size=2, timeout=timeout
        )
    )


def errors_of(fresh: Fresh, folder: Path, rate: str | None, env: list[dict[str, str]]) -> list[str]:
    try:
        with Network(2, rate=rate) as network:
            store = str(folder / "store")
            ranks = fresh.start(join, network.hosts, store, env, world=2, group=False)
            return [str(reply.value) for reply in replies(ranks, 60)]
    except NoNetwork as why:
        pytest.skip(str(why))


def test_why_one_rank_cannot_connect_is_told_to_the_other(fresh: Fresh, tmp_path: Path) -> None:
    env = [{"GLOO_SOCKET_IFNAME": "nowhere0"}, {}]
    mine, other = errors_of(fresh, tmp_path, None, env)
    assert "rank 0 of 2" in mine, mine
    assert "nowhere0" in mine, mine
    assert "rank 1 of 2" in other, other
    assert "rank 0 has aborted the group" in other, other
    assert "nowhere0" in other, other


def test_what_fails_while_costs_are_measured_is_told_as_of_the_group(
    fresh: Fresh, tmp_path: Path
) -> None:
    """The program has made no call yet: what the group measures with is none of its own."""
    env = [{"DREAMCOMM_COSTS": "auto"}] * 2
    for rank, told in enumerate(errors_of(fresh, tmp_path, "64kbit", env)):
        words = f"setting up a group on rank {rank} of 2, whose costs were being measured: "
        assert words in told, told


def connect_with_one_in_trouble(
    rank: int, port: int, at: str, number: int, patience: float
) -> tuple[str, float]:
    """Rank 2 gets the signal of that number once it has told `at`."""
    store: dist.Store = dist.TCPStore("127.0.0.1", port, 3, False)
    if rank == 2:
        store = Deadly(store, at, number)
    timeout = timedelta(seconds=patience)
    found = end_of(
        lambda: dist.init_process_group(
            "dreamcomm", store=store, rank=rank, world_size=3, timeout=timeout
        )
    )
    if rank == 2:
        signal.pause()  # where it lives on, with its store
    return found


def told_to_others(fresh: Fresh, hosts: str, *trouble: Any) -> list[tuple[str, float]]:
    ranks = fresh.start(
        connect_with_one_in_trouble,
        *trouble,
        world=3,
        group=False,
        env={"DREAMCOMM_HOSTS": hosts},
    )
    found = replies(ranks[:2], 60)
    os.kill(ranks[2].pid, signal.SIGKILL)
    for reply in found:
        assert reply.error is None, reply.error
    return [reply.value for reply in found]


STOPS = {
    "calls": ("a,b,c", "between/dreamcomm/gloo/0/2"),
    "messages": ("a,b,c", "1/dreamcomm/gloo/0/2"),
    "part": ("a,b,b", "host/1/card/1"),
}


@pytest.mark.parametrize("carries", STOPS)
def test_a_rank_that_stops_while_hosts_connect_is_named(
    fresh: Fresh, carries: str, soak: bool, slack: float
) -> None:
    """Gloo tries five times to connect with each rank, and names none."""
    hosts, last = STOPS[carries]
    if carries == "calls" and not soak:
        pytest.skip("only with --soak")
    store = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
    for text, seconds in told_to_others(fresh, hosts, store.port, last, signal.SIGSTOP, 1.0):
        assert re.search(r"could not connect .* other hosts|setting up (a|the part)", text), text
        named = r"rank 2 of host c \(rank 2\)|rank 2 of host b|rank 2 has not come"
        assert re.search(named, text), text
        assert not re.search("nothing was heard in that time of rank [01]", text), text
        assert not re.search(r"\.(cc|h):\d", text), text  # places in Gloo's sources
        assert seconds < 11 + slack, text  # the least that a group is waited for is 10 s


# Keys of the bootstrap of all ranks, of that of its host's ranks (twice), and of its Gloo address.
STEPS = ["shm/maps/2", "host/1/card/1", "host/1/dial/1", "between/dreamcomm/gloo/0/2"]


@pytest.mark.parametrize("told_last", STEPS)
def test_a_rank_that_dies_while_hosts_connect_is_told_of_soon(
    fresh: Fresh, told_last: str, slack: float
) -> None:
    """By its host's ranks: Gloo would wait for it until the timeout."""
    store = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
    told = told_to_others(fresh, "a,b,b", store.port, told_last, signal.SIGKILL, 60.0)
    for text, seconds in told:
        assert "the process of rank 2 has ended" in text, text
        assert seconds < 2 + slack, text


@pytest.mark.parametrize("hosts", ["a,b,b", "a,b,c"])
def test_a_rank_that_is_interrupted_between_two_meetings_is_told_of_soon(
    fresh: Fresh, hosts: str, slack: float
) -> None:
    """It lives on, and the others have left the meeting on whose board it tells so."""
    store = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
    told = told_to_others(fresh, hosts, store.port, "shm/maps/2", signal.SIGINT, 60.0)
    for text, seconds in told:
        assert "rank 2 has aborted the group: it was interrupted" in text, text
        assert seconds < 2 + slack, text
