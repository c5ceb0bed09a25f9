"""Monitored barriers of multi-node groups: the named ranks, the texts, and the group afterwards."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dreamcomm
from helpers.logs import warnings_of_all_threads
from helpers.processes import replies
from internode.hosts import Hosts, Placement
from internode.test_collectives import TWO_OF_TWO
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")

SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=30)
ONE_EACH: Placement = [[0], [1], [2], [3]]
RANKS_OF = ["ranks 0, 1", "ranks 0, 1", "ranks 2, 3", "ranks 2, 3"]  # the host of each


def hold(timeout: timedelta = LONG, wait_all: bool = False) -> str:
    return error_of(lambda: dreamcomm.monitored_barrier(None, timeout, wait_all))


def send_ahead() -> list[float]:
    """A message waits for its receiver while all are in a monitored barrier."""
    data = torch.full((100_000,), 5.0)
    sent = dist.isend(data, 0) if dist.get_rank() == 1 else None
    for _ in range(3):
        assert hold() == "no error"
    if sent is not None:
        sent.wait()
    if dist.get_rank() != 0:
        return []
    room = torch.zeros(100_000)
    dist.recv(room, 1)
    return [room[0].item(), room[-1].item()]


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_messages_and_monitored_barriers_do_not_meet(hosts: Hosts, store: str) -> None:
    found = hosts.run([[0], [1]], send_ahead, store=store)
    assert found == [[5.0, 5.0], []]


def miss(absent: list[int], wait_all: bool) -> tuple[str, float]:
    dist.all_reduce(torch.ones(3))
    text, seconds = "", 0.0
    if dist.get_rank() not in absent:
        begin = time.monotonic()
        text = hold(SHORT, wait_all)
        seconds = time.monotonic() - begin
    else:
        time.sleep(2.5)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 4
    assert hold() == "no error"
    return text, seconds


@pytest.mark.parametrize(
    ("absent", "wait_all"),
    [
        ([1], False),
        ([2], False),
        ([1, 3], True),
        *(
            pytest.param(*rest, marks=pytest.mark.long)
            for rest in [([3], False), ([1, 3], False), ([1], True), ([3], True), ([2], True)]
        ),
    ],
    ids=str,
)
def test_the_missing_are_named_in_the_words_of_one_host(
    hosts: Hosts, absent: list[int], wait_all: bool, slack: float
) -> None:
    found = hosts.run(TWO_OF_TWO, miss, absent, wait_all)
    named = absent if wait_all else absent[:1]
    names = f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
    begin = rf"{names} failed to pass monitoredBarrier in \d+ ms \(group seen from rank 0 of 4 in"
    for rank, (text, seconds) in enumerate(found):
        if rank in absent:
            continue
        assert seconds < 1.1 * SHORT.total_seconds() + 1 + slack, (rank, seconds)
        if absent == [2] and rank == 3:  # who calls its host's roll has not come
            assert "waiting for rank 2 to enter it" in text, text
        else:
            assert re.search(begin, text), (rank, text)
    if absent == [2]:
        assert "nothing has arrived from rank 2 of host" in found[0][0]
    else:
        assert re.search(rf"rank {named[-1]} last called \S+ as call \d+, entered", found[0][0])
        assert "its main thread is at" in found[0][0]


def come_last() -> str:
    if dist.get_rank() == 0:
        time.sleep(2.5)
    text = hold(SHORT)
    dist.all_reduce(torch.ones(3))
    assert hold() == "no error"
    return text


def test_a_late_rank_0_is_told_so(hosts: Hosts) -> None:
    late, *others = hosts.run(TWO_OF_TWO, come_last)
    begin = r"monitored_barrier on rank 0 of 4 in group '\w+' came too late; .*"
    assert re.search(begin + "rank [123].* has stopped waiting", late), late
    for rank, text in enumerate(others, 1):
        assert "failed to pass" not in text, text
        assert f"waiting for rank {0 if rank < 3 else 2} to enter it" in text or (
            "of waiting for rank 0 of host" in text
        ), text


def lose(victim: int) -> tuple[str, float]:
    dist.all_reduce(torch.ones(3))
    assert hold() == "no error"
    if dist.get_rank() == victim:
        time.sleep(0.5)  # the others wait
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    return hold(), time.monotonic() - begin


@pytest.mark.parametrize(
    "victim", [0, 3, *(pytest.param(rest, marks=pytest.mark.long) for rest in (1, 2))]
)
def test_a_monitored_barrier_does_not_wait_for_the_dead(
    hosts: Hosts, victim: int, slack: float
) -> None:
    found = replies(hosts.start(TWO_OF_TWO, lose, victim), timeout=60)
    for rank in {0, 1, 2, 3} - {victim}:
        assert found[rank].error is None, found[rank].error
        text, seconds = found[rank].value
        if rank // 2 != victim // 2:  # its own host's ranks may see it first
            assert re.search(rf"host \S+ \({RANKS_OF[victim]}\): the process of rank", text), text
            assert victim == 0 or f"Rank {victim} failed to pass monitoredBarrier" in text, text
        assert f"the process of rank {victim} has ended" in text, text
        assert f"rank {victim} last called all_reduce as call 1, entered" in text, text
        assert seconds < 2.5 + slack, (rank, seconds)


@pytest.mark.parametrize(
    ("victim", "store"),
    [
        (0, "tcp"),
        (1, "file"),
        *(pytest.param(*rest, marks=pytest.mark.long) for rest in [(0, "file"), (1, "tcp")]),
    ],
)
def test_a_dead_rank_that_was_alone_on_its_host_is_named(
    hosts: Hosts, victim: int, store: str, slack: float
) -> None:
    """Also where it kept the store."""
    found = replies(hosts.start(ONE_EACH, lose, victim, store=store), timeout=60)
    for rank in {0, 1, 2, 3} - {victim}:
        assert found[rank].error is None, found[rank].error
        text, seconds = found[rank].value
        place = rf"rank {victim} of host \S+ \(rank {victim}\)"
        assert re.search(f"{place}: the connection to rank {victim} has failed", text), text
        if victim == 1:
            assert "Rank 1 failed to pass monitoredBarrier" in text, text
        assert seconds < 2.5 + slack, (rank, seconds)


def wait_long(absent: int, seconds: float) -> tuple[list[str], str]:
    dist.all_reduce(torch.ones(3))
    with warnings_of_all_threads() as texts:
        if dist.get_rank() == absent:
            time.sleep(seconds)
        said = hold()
    return texts, said


@pytest.mark.parametrize(
    "absent", [0, 3, *(pytest.param(rest, marks=pytest.mark.long) for rest in (1, 2))]
)
def test_a_long_wait_for_another_host_is_told_of(hosts: Hosts, absent: int) -> None:
    found = hosts.run(TWO_OF_TWO, wait_long, absent, 4.5)
    assert [said for _, said in found] == ["no error"] * 4
    assert found[absent][0] == []
    for rank in {0, 2} - {absent}:  # those that call a roll
        (text,) = found[rank][0]
        what, whom = "monitored_barrier", ""
        if RANKS_OF[rank] == RANKS_OF[absent]:
            whom = rf" for rank {absent}, which last called all_reduce as call 1, entered .*"
        else:
            leader = 2 - rank
            what += rf", in which rank {rank} waits for rank {leader} of host \S+ "
            what += rf"\({RANKS_OF[leader]}\),"
            what += "" if absent == leader else f" which waits for others{' there' * (rank == 0)},"
        assert re.match(
            rf"{what} on rank {rank} of 4 in group 'default' has come to [3-5]\.\d s of "
            rf"waiting{whom}; its timeout is after (29\.9|30\.0) s$",
            text,
        ), text


def interrupt(victim: int, folder: str) -> tuple[str, float]:
    """While the others wait for rank 3, which waits until that is over."""
    rank = dist.get_rank()
    assert hold() == "no error"
    told = Path(folder, "told")
    text, begin = "", time.monotonic()
    if rank == 3:
        while not told.exists():
            time.sleep(0.02)
    else:
        if rank == victim:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            text = hold()
        except KeyboardInterrupt:
            text = "interrupted"
    seconds = time.monotonic() - begin
    told.touch()
    dist.all_reduce(torch.ones(3))
    assert hold() == "no error"
    return text, seconds


@pytest.mark.parametrize("victim", [0, 2])
def test_an_interrupt_ends_a_monitored_barrier(
    hosts: Hosts, tmp_path: Path, victim: int, slack: float
) -> None:
    found = hosts.run(TWO_OF_TWO, interrupt, victim, str(tmp_path))
    assert found[victim][0] == "interrupted"
    for rank in range(3):
        text, seconds = found[rank]
        assert seconds < 3.0 + slack, (rank, seconds)
        if rank != victim:
            assert f"rank {victim} was interrupted in it" in text, text


def hold_and_go() -> float:
    begin = time.monotonic()
    for _ in range(20):
        assert hold() == "no error"
    return time.monotonic() - begin


@pytest.mark.parametrize("placement", [TWO_OF_TWO, ONE_EACH], ids=str)
def test_the_last_one_passes_though_rank_0_keeps_the_store_and_goes(
    hosts: Hosts, placement: Placement
) -> None:
    for _ in range(3):
        for seconds in hosts.run(placement, hold_and_go, store="tcp"):
            assert seconds < 10


def cut_off(gone: str) -> tuple[str, float]:
    assert hold() == "no error"
    Path(f"{gone}-{dist.get_rank()}").touch()
    while not Path(gone + "-cut").exists():
        time.sleep(0.01)
    begin = time.monotonic()
    return hold(SHORT), time.monotonic() - begin


def test_a_host_that_is_cut_off_is_named(hosts: Hosts, tmp_path: Path, slack: float) -> None:
    assert hosts.network is not None
    gone = tmp_path / "gone"
    ranks = hosts.start(TWO_OF_TWO, cut_off, str(gone), store="tcp")
    # Who has not passed the first one yet would wait for its end in vain.
    end = time.monotonic() + 60
    while not all(Path(f"{gone}-{rank}").exists() for rank in range(4)):
        assert time.monotonic() < end, "a rank has not passed the first one"
        time.sleep(0.05)
    hosts.network.cut(1)
    Path(f"{gone}-cut").touch()
    for rank, found in enumerate(replies(ranks, timeout=60)):
        assert found.error is None, found.error
        text, seconds = found.value
        if rank < 2:
            assert "Rank 2 failed to pass monitoredBarrier" in text, text
            assert re.search(r"nothing has arrived from rank 2 of host \S+ \(ranks 2, 3\)", text)
        else:
            assert re.search(r"waiting for rank 0 of host \S+ \(ranks 0, 1\)", text), text
        assert seconds < 3.0 + slack, (rank, seconds)


def lose_the_judge(begun: str) -> tuple[str, float]:
    """Rank 0 waits for rank 1, who does not come, and is not heard of any more from then on."""
    rank, over = dist.get_rank(), [Path(f"{begun}-over-{rank}") for rank in (2, 3)]
    assert hold() == "no error"
    if rank == 1:
        end = time.monotonic() + 60
        while not all(one.exists() for one in over) and time.monotonic() < end:
            time.sleep(0.05)
        return "", 0.0
    Path(f"{begun}-{rank}").touch()
    begin = time.monotonic()
    text, seconds = hold(timedelta(seconds=3)), time.monotonic() - begin
    Path(f"{begun}-over-{rank}").touch()
    return text, seconds


def test_a_judge_that_falls_silent_is_not_waited_for_long(
    hosts: Hosts, tmp_path: Path, slack: float
) -> None:
    assert hosts.network is not None
    begun = tmp_path / "begun"
    ranks = hosts.start(TWO_OF_TWO, lose_the_judge, str(begun), store="tcp")
    end = time.monotonic() + 60
    while not all(Path(f"{begun}-{rank}").exists() for rank in (0, 2, 3)):
        assert time.monotonic() < end, "a rank has not come"
        time.sleep(0.05)
    time.sleep(1)  # for the leaders to hear of each other
    hosts.network.cut(0)
    found = replies(ranks, timeout=60)
    for rank in (2, 3):
        assert found[rank].error is None, found[rank].error
        text, seconds = found[rank].value
        assert re.search(
            r"of waiting for rank 0 of host \S+ \(ranks 0, 1\), which has been in it", text
        )
        # A tenth more, what rank 0 would take to judge, and what a store takes not to answer.
        assert seconds < 3.3 + 1.6 + 0.6 + slack, (rank, seconds)
