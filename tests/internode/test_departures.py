"""Ranks that leave because a third one has died: a rank that waits for them names that one."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

import dreamcomm
from helpers.processes import replies
from internode.hosts import Hosts, Placement, size_of
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")

ALONE = [[0], [1], [2]]
IN_TWO = [[0, 1], [2, 3]]
BESIDE = [[0, 1], [2]]


def lose_the_last(learns: str, waits: str) -> tuple[str, float]:
    """The last rank dies. The one before it learns of that elsewhere, and leaves the group in good
    order; the others wait for that one."""
    last = dist.get_world_size() - 1
    rank, data = dist.get_rank(), torch.ones(3)
    pair = dist.new_group([last - 1, last])
    if rank >= last - 1:
        dist.all_reduce(data, group=pair)
    dist.barrier()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)

    def call() -> None:
        if rank == last - 1 and learns == "in a group":
            dist.all_reduce(data, group=pair)
        elif rank == last - 1:
            dist.recv(data, last)
        elif waits == "in a call":
            dist.all_reduce(data)
        else:
            dist.recv(data, last - 1)

    begin = time.monotonic()
    return error_of(call), time.monotonic() - begin


def lose_the_other_of_a_pair() -> tuple[str, str]:
    rank = dist.get_rank()
    pair = dist.new_group([1, 3])
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 1:
        return "", ""
    call = error_of(lambda: dist.all_reduce(torch.ones(3), group=pair))
    return call, error_of(lambda: dist.recv(torch.ones(3), 3, group=pair))


def test_the_ranks_of_some_of_the_job_are_told_as_the_jobs(hosts: Hosts) -> None:
    found = replies(hosts.start(IN_TWO, lose_the_other_of_a_pair), 60)[1]
    assert found.error is None, found.error
    for text in found.value:
        assert re.search(r"on rank 0 of 2 in group '\d+' \(ranks 1, 3 of the job\)", text), text


@pytest.mark.parametrize(
    ("placement", "learns", "waits"),
    [
        (ALONE, "in a group", "in a call"),
        (ALONE, "in a message", "for a message"),
        (IN_TWO, "in a message", "in a call"),
        (IN_TWO, "in a group", "for a message"),
        (BESIDE, "in a group", "in a call"),
    ],
)
def test_the_dead_rank_is_named(
    hosts: Hosts, placement: Placement, learns: str, waits: str, slack: float
) -> None:
    dead = size_of(placement) - 1
    ranks = hosts.start(placement, lose_the_last, learns, waits, seconds=60)
    for reply in replies(ranks, 60)[: dead - 1]:
        assert reply.error is None, reply.error
        error, seconds = reply.value
        assert f"the connection to rank {dead} has failed" in error, error
        assert seconds < 2 + slack, (seconds, error)


def lose_the_second(waits: str) -> str:
    """Rank 1 dies. Rank 0 learns of that in a message, and leaves; rank 2 waits for rank 0."""
    rank, data = dist.get_rank(), torch.ones(3)
    assert error_of(dreamcomm.monitored_barrier) == "no error"
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 or waits == "for a message":
        return error_of(lambda: dist.recv(data, 1 if rank == 0 else 0))
    if waits == "for a receiver":
        return error_of(lambda: dist.send(torch.ones(300_000), 0))
    return error_of(dreamcomm.monitored_barrier)


@pytest.mark.parametrize(
    ("placement", "waits", "words"),
    [
        ([[0], [1, 2]], "for a message", "the process of rank 1 has ended"),
        ([[0], [1, 2]], "for a receiver", "the process of rank 1 has ended"),
        (ALONE, "in a monitored barrier", "the connection to rank 1 has failed"),
        ([[0, 1], [2]], "in a monitored barrier", "the connection to rank 1 has failed"),
    ],
)
def test_a_dead_rank_is_named_to_whom_it_was_no_concern_of(
    hosts: Hosts, placement: Placement, waits: str, words: str
) -> None:
    reply = replies(hosts.start(placement, lose_the_second, waits, seconds=60), 60)[2]
    assert reply.error is None, reply.error
    assert "rank 0" in reply.value, reply.value
    assert words in reply.value, reply.value
