"""A rank that waits long says so before it fails."""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dreamcomm import monitored_barrier
from helpers.logs import Kept, warnings_of_all_threads
from helpers.pool import Pool
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("Gloo does not warn")


def sleep_for(seconds: float) -> None:
    time.sleep(seconds)


def wait_for_rank_1(seconds: float) -> list[str]:
    with warnings_of_all_threads() as texts:
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 1:
            sleep_for(seconds)
        dist.broadcast(torch.ones(4), 1)
    return texts


def test_a_late_rank_is_told_of_once_at_a_tenth_of_the_timeout(pool: Pool) -> None:
    waiting, late = pool.run(wait_for_rank_1, 3.5, group_timeout=30.0)
    assert late == []
    (text,) = waiting
    assert text.startswith("broadcast(4 x float32, root 1) on rank 0 of 2")
    assert "s of waiting for rank 1, which last called all_reduce as call" in text
    assert re.search(r"its main thread is at \S*test_warnings\.py:\d+ in sleep_for;", text), text
    assert text.endswith("its timeout is after 30.0 s")


def test_a_short_wait_is_not_worth_a_word(pool: Pool) -> None:
    assert pool.run(wait_for_rank_1, 0.4, group_timeout=5.0) == [[], []]


def wait_aside() -> list[str]:
    """The group's own thread waits, which has no Python: the logger is told all the same."""
    kept, logger = Kept(), logging.getLogger("dreamcomm")
    logger.addHandler(kept)
    work = dist.all_reduce(torch.ones(3), async_op=dist.get_rank() == 0)
    if work is not None:
        deadline = time.monotonic() + 30
        while not kept.texts and time.monotonic() < deadline:
            time.sleep(0.02)
        work.wait()
    logger.removeHandler(kept)
    return kept.texts


def come_late() -> list[str]:
    if dist.get_rank() == 1:
        sleep_for(2.0)
    return wait_aside()


def test_of_an_asynchronous_call_the_logger_is_told(pool: Pool) -> None:
    ((text,), late) = pool.run(come_late, group_timeout=10.0)
    assert late == []
    assert text.startswith("all_reduce(SUM, 3 x float32) on rank 0 of 2"), text


def both_receive() -> list[str]:
    dist.barrier()
    data = torch.ones(1)
    with warnings_of_all_threads() as texts:
        work = dist.irecv(data, 1 - dist.get_rank())
        assert work is not None
        deadline = time.monotonic() + 30
        while not texts and time.monotonic() < deadline:
            time.sleep(0.02)
        meet_aside()
        dist.send(data, 1 - dist.get_rank())
        work.wait()
    return texts


def meet_aside() -> None:
    """By the store alone: the first one's message would spare the other rank its warning."""
    store = _get_default_store()
    store.set(f"warned {dist.get_rank()}", "")
    store.wait([f"warned {rank}" for rank in range(dist.get_world_size())], timedelta(seconds=8))


def test_a_rank_that_waits_for_this_one_is_told_so(pool: Pool) -> None:
    for rank, texts in enumerate(pool.run(both_receive, group_timeout=10.0)):
        other = 1 - rank
        assert re.search(
            rf"rank {other} has not sent it.*; its recv from rank {rank} has waited", texts[0]
        )


def wait_for_messages_of_rank_1(seconds: float) -> list[str]:
    """One that is received by name, one from any rank, and one that is not taken."""
    dist.barrier()
    large, small = torch.ones(300_000), torch.ones(3)
    with warnings_of_all_threads() as texts:
        if dist.get_rank() == 1:
            sleep_for(seconds)
            dist.recv(large, 0)
            for tag in (1, 1, 2):
                dist.send(small, 0, tag=tag)
        else:
            works = [dist.isend(large, 1), dist.irecv(small, 1, tag=1), dist.irecv(small, 1, tag=1)]
            dist.recv(small, tag=2)
            for work in works:
                assert work is not None
                work.wait()
    return texts


def test_of_messages_that_wait_one_of_each_kind_is_told_of(pool: Pool) -> None:
    """The later of two receives from one rank waits for nothing that the first one did not."""
    waiting, late = pool.run(wait_for_messages_of_rank_1, 2.5, group_timeout=10.0)
    assert late == []
    assert len(waiting) == 3, waiting
    named, any_rank, taken = sorted(waiting, key=lambda text: text.replace("any", "z"))
    assert taken.startswith("send to rank 1 (1200000 bytes, tag 0) on rank 0 of 2"), taken
    assert "rank 1 has not received it; it last called barrier" in taken
    for text in (any_rank, named):
        source = "rank 1 (12 bytes, tag 1)" if text is named else "any rank (12 bytes, tag 2)"
        assert text.startswith(f"recv from {source} on rank 0 of 2"), text
    assert "s of waiting: no rank has sent one; its timeout" in any_rank
    assert re.search(r"s of waiting: rank 1 has not sent it; .* in sleep_for;", named), named
    for text in waiting:
        assert text.endswith("its timeout is after 10.0 s")


def miss_the_barrier(seconds: float) -> list[str]:
    with warnings_of_all_threads() as texts:
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 2:
            sleep_for(seconds)
        monitored_barrier(timeout=10.0)
    return texts


def test_in_a_monitored_barrier_all_ranks_name_the_one_that_is_missing(pool: Pool) -> None:
    *waiting, late = pool.run(miss_the_barrier, 2.0, world=3)
    assert late == []
    for rank, texts in enumerate(waiting):
        (text,) = texts
        begin = f"monitored_barrier on rank {rank} of 3 in group 'default' has come to "
        assert text.startswith(begin), text
        assert "s of waiting for rank 2, which last called all_reduce as call" in text
        assert re.search(r"its timeout is after (10.0|9.\d) s$", text), text


def wait_for_a_part_of_the_timeout(message: bool) -> str:
    dist.all_reduce(torch.ones(3))
    data = torch.ones(4)
    if dist.get_rank() == 1:
        sleep_for(1.5)
        dist.send(data, 0) if message else dist.all_reduce(data)
        return ""
    work = dist.irecv(data, 1) if message else dist.all_reduce(data, async_op=True)
    assert work is not None
    text = error_of(lambda: work.wait(timedelta(seconds=0.5)))
    work.wait()
    return text


@pytest.mark.parametrize("message", [False, True])
def test_a_wait_for_a_part_of_the_timeout_says_for_whom(pool: Pool, message: bool) -> None:
    text = pool.run(wait_for_a_part_of_the_timeout, message)[0]
    assert "Timed out waiting 500 ms for this work on rank 0 of 2 in group 'default'" in text
    whom = ": rank 1 has not sent it; it " if message else ", which waits for rank 1, which "
    assert whom + "last called all_reduce as call 1, entered" in text, text
    assert "sleeps or waits, outside of all collectives" in text, text
    assert text.rstrip().endswith("; the call itself goes on"), text
