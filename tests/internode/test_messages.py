"""send and recv of multi-node groups: shared memory within hosts, message headers between."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import dreamcomm
from helpers.pool import Fresh
from helpers.processes import replies
from internode.hosts import Hosts
from internode.network import Network, NoNetwork
from internode.test_collectives import TWO_OF_TWO
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")

SECONDS = 2.0
TO, NEAR, FAR = 2, 3, 1  # who receives, and from which host


def wait_for(path: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(path).exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def order_by_source(count: int) -> list[list[float]]:
    """Everybody sends one rank, which takes from any; what came from each, in order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank != TO:
        works = [dist.isend(torch.full((count,), float(number)), TO, tag=4) for number in range(10)]
        for work in works:
            assert work is not None
            work.wait()
        return []
    found: list[list[float]] = [[] for _ in range(size)]
    for _ in range(10 * (size - 1)):
        room = torch.empty(count)
        source = dist.recv(room, tag=4)
        assert room.eq(room[0]).all()
        found[source].append(room[0].item())
    return found


@pytest.mark.parametrize("count", [3, 50_000])
def test_a_receive_from_any_source_takes_from_both_levels(hosts: Hosts, count: int) -> None:
    found = hosts.run(TWO_OF_TWO, order_by_source, count)
    every = [float(number) for number in range(10)]
    assert found[TO] == [[] if rank == TO else every for rank in range(4)]


def send_more(peer: int) -> tuple[str, float]:
    rank = dist.get_rank()
    text = ""
    if rank == TO:
        text = error_of(lambda: dist.recv(torch.empty(2000), peer))
    elif rank == peer:
        text = error_of(lambda: dist.send(torch.ones(3000), TO))
    total = torch.ones(10)
    dist.all_reduce(total)
    return text, total[0].item()


@pytest.mark.parametrize("peer", [NEAR, FAR])
def test_sizes_that_differ_are_told_on_both_ranks(hosts: Hosts, peer: int) -> None:
    found = hosts.run(TWO_OF_TWO, send_more, peer)
    assert [total for _, total in found] == [4.0] * 4
    assert "expects 8000 bytes, but rank" in found[TO][0], found[TO][0]
    assert "sent 12000" in found[TO][0], found[TO][0]
    assert "was refused: the matching recv expects 8000 bytes" in found[peer][0], found[peer][0]


def wait_in_vain(source: int | None, folder: str) -> tuple[str, float, float]:
    """One rank waits for a message that does not come; the next one is not taken for it."""
    if dist.get_rank() == FAR:
        wait_for(f"{folder}/told")
        dist.send(torch.full((10,), 8.0), TO, tag=6)
    if dist.get_rank() != TO:
        return "", 0.0, 0.0
    begin = time.monotonic()
    text = error_of(lambda: dist.recv(torch.empty(10), source, tag=6))
    seconds = time.monotonic() - begin
    Path(folder, "told").touch()
    room = torch.zeros(10)
    dist.recv(room, source, tag=6)
    return text, seconds, room[9].item()


@pytest.mark.parametrize("source", [FAR, None])
def test_a_receive_in_vain_is_told_and_withdrawn(
    hosts: Hosts, source: int | None, tmp_path: Path, slack: float
) -> None:
    found = hosts.run(TWO_OF_TWO, wait_in_vain, source, str(tmp_path), seconds=SECONDS)
    text, seconds, value = found[TO]
    assert "reached its timeout" in text, text
    assert ("any rank" if source is None else f"rank {FAR} of host") in text, text
    assert SECONDS <= seconds < 1.1 * SECONDS + 0.1 + slack
    assert value == 8.0


def wait_for_a_part_of_the_timeout(waited: str) -> str:
    rank, data = dist.get_rank(), torch.ones(100)
    dist.barrier()
    if rank == 1:
        wait_for(waited)
        dist.send(data, 0)
    if rank != 0:
        return ""
    work = dist.irecv(data, 1)
    assert work is not None
    text = error_of(lambda: work.wait(timedelta(seconds=0.4)))
    Path(waited).touch()
    work.wait()
    return text


def test_a_wait_for_a_part_of_the_timeout_says_for_whom(hosts: Hosts, tmp_path: Path) -> None:
    text = hosts.run([[0], [1]], wait_for_a_part_of_the_timeout, str(tmp_path / "waited"))[0]
    assert "Timed out waiting 400 ms for this work on rank 0 of 2 in group 'default': " in text
    assert re.search(r": rank 1 of host \S+ \(rank 1\) has not sent it; the call itself", text), (
        text
    )


def lose_a_sender(peer: int, folder: str) -> tuple[str, float, float]:
    rank = dist.get_rank()
    dist.barrier()
    if rank == peer:
        wait_for(f"{folder}/asked")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != TO:
        if rank == 0:
            wait_for(f"{folder}/told")
            dist.send(torch.ones(2000), TO, tag=9)
        return "", 0.0, 0.0
    room = torch.zeros(2000)
    other = dist.irecv(room, None, tag=9)
    assert other is not None
    lost: list[Any] = [dist.irecv(torch.empty(10), peer), dist.irecv(torch.empty(9000), peer)]
    begin = time.monotonic()
    Path(folder, "asked").touch()
    texts = [error_of(work.wait) for work in lost]
    seconds = time.monotonic() - begin
    if peer == FAR:  # within a host a small one is left for the receiver, who may be gone
        texts.append(error_of(lambda: dist.send(torch.ones(5), peer)))
    assert all("cannot finish" in text for text in texts), texts
    Path(folder, "told").touch()
    other.wait()
    return texts[0], seconds, room.sum().item()


@pytest.mark.parametrize("peer", [NEAR, FAR])
def test_a_dead_sender_is_told_and_harms_no_other(
    hosts: Hosts, peer: int, tmp_path: Path, slack: float
) -> None:
    ranks = hosts.start(TWO_OF_TWO, lose_a_sender, peer, str(tmp_path))
    found = replies(ranks, timeout=60)
    assert found[TO].error is None, found[TO].error
    text, seconds, total = found[TO].value
    assert f"rank {peer}" in text, text
    assert seconds < 1.0 + slack
    assert total == 2000.0


def send_and_leave() -> list[float]:
    """Senders are done, and gone, long before their data has come."""
    rank = dist.get_rank()
    data = torch.full((300_000,), float(rank))
    if rank != TO:
        dist.send(data, TO, tag=rank % 2)
        return []
    ends = []
    for source in (None, NEAR, 1):
        dist.recv(data, source, tag=0 if source is None else 1)
        ends.append(data[-1].item())
    return ends


def test_senders_may_leave_while_their_data_is_on_its_way(fresh: Fresh, tmp_path: Path) -> None:
    try:
        with Network(2, rate="50mbit") as slow:  # 0.2 s each
            found = Hosts(fresh, tmp_path, slow).run(TWO_OF_TWO, send_and_leave)
    except NoNetwork as why:
        pytest.skip(str(why))
    assert found[TO] == [0.0, 3.0, 1.0]


def send_around() -> tuple[list[float], set[str], dict[str, dict[str, int]]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, room = torch.full((3000,), float(rank)), torch.empty(3000).t()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, (rank + 1) % size),
                dist.P2POp(dist.irecv, room, (rank - 1) % size),
            ]
        )
        for work in works:
            work.wait()
    objects: list[Any] = [{"from": rank}] if rank == 0 else [None]
    if rank == 0:
        dist.send_object_list(objects, 3)
    elif rank == 3:
        dist.recv_object_list(objects, 0)
        assert objects == [{"from": 0}]
    titles = {event.name for event in profiled.events() if "dreamcomm" in event.name}
    return [room[0].item(), room[-1].item()], titles, dreamcomm.stats()


def test_what_messages_leave_in_profiles_and_counts(hosts: Hosts) -> None:
    for rank, (ends, titles, counts) in enumerate(hosts.run(TWO_OF_TWO, send_around)):
        assert ends == [float((rank - 1) % 4)] * 2
        assert {"dreamcomm:send", "dreamcomm:recv"} <= titles
        between = 12_000 if rank in (1, 3) else 0
        extra = counts["send"]["sent_between_hosts"] - between
        assert 0 < extra < 1000 if rank == 0 else extra == 0
