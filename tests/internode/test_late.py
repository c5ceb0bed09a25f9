"""A long wait for another host is logged before it fails."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

from collectives.test_warnings import come_late
from helpers.logs import warnings_of_all_threads
from internode.hosts import Hosts
from internode.test_collectives import TWO_OF_TWO

pytestmark = pytest.mark.beyond_gloo("Gloo does not warn")


def wait_for_rank_1(seconds: float) -> list[str]:
    """In a collective, and in messages of both sorts."""
    data, large = torch.ones(4), torch.ones(100_000)
    with warnings_of_all_threads() as texts:
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 1:
            time.sleep(seconds)
        dist.broadcast(data, 1)
        if dist.get_rank() == 0:
            dist.recv(data, 1)
            dist.send(large, 1)
        else:
            time.sleep(seconds)
            dist.send(data, 0)
            time.sleep(seconds)
            dist.recv(large, 0)
    return texts


def test_a_late_host_is_told_of_once_at_a_tenth_of_the_timeout(hosts: Hosts) -> None:
    waiting, late = hosts.run([[0], [1]], wait_for_rank_1, 3.6, seconds=30.0)
    assert late == []
    call, receive, send = waiting
    place = r"rank 1 of host \S+ \(rank 1\)"
    assert re.match(
        rf"broadcast\(4 x float32, root 1\), in which rank 0 waits for {place}, on rank 0 of 2 in "
        r"group 'default' has come to [3-5]\.\d s of waiting; "
        r"its timeout is after (29\.9|30\.0) s$",
        call,
    ), call
    assert re.match(
        rf"recv of 16 bytes with tag 0 from {place} on rank 0 of 2 in group 'default' has waited "
        r"3\.\d s: rank 1 has not sent it; its timeout is after 30\.0 s$",
        receive,
    ), receive
    assert re.match(
        rf"send of 400000 bytes with tag 0 to {place} on rank 0 of 2 in group 'default' has waited "
        r"3\.\d s: rank 1 has not received it; its timeout is after 30\.0 s$",
        send,
    ), send


def test_a_short_wait_is_not_worth_a_word(hosts: Hosts) -> None:
    assert hosts.run([[0], [1]], wait_for_rank_1, 0.4, seconds=5.0) == [[], []]


def test_of_an_asynchronous_call_the_logger_is_told(hosts: Hosts) -> None:
    """Also on a host of one rank, where nobody else of the group is to be answered."""
    ((text,), late) = hosts.run([[0], [1]], come_late, seconds=10.0)
    assert late == []
    assert text.startswith("all_reduce(SUM, 3 x float32), in which rank 0 waits for rank 1"), text


def wait_for_rank_3(seconds: float) -> list[str]:
    with warnings_of_all_threads() as texts:
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 3:
            time.sleep(seconds)
        dist.broadcast(torch.ones(4), 1)
    return texts


def test_a_late_rank_is_described_by_its_host(hosts: Hosts) -> None:
    found = hosts.run(TWO_OF_TWO, wait_for_rank_3, 2.0, seconds=10.0)
    assert found[3] == []
    assert any("waits for rank 2 of host" in text for text in found[0]), found[0]
    late = "of waiting for rank 3, which last called all_reduce as call 1, entered"
    assert any(late in text for text in found[2]), found[2]
    for text in (*found[0], *found[1], *found[2]):  # the program's call, whatever its parts are
        assert text.startswith("broadcast(4 x float32, root 1)"), text
    waits = "for rank 0, which waits for ranks of other hosts in broadcast as call 2, entered"
    assert any(waits in text for text in found[1]), found[1]
