"""What ends a wait: timeouts, absent ranks, abort. Each names who was waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Pool

SHORT = timedelta(milliseconds=300)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:  # DistBackendError is one
        return str(error)
    return "no error"


def meet() -> None:
    """All ranks get here, without the group under test."""
    dist.barrier()


def group_timeout() -> list[str]:
    group = dist.new_group(timeout=SHORT)
    found = []
    if dist.get_rank() == 0:
        found = [error_of(lambda: dist.all_reduce(torch.ones(2), group=group)) for _ in range(2)]
    meet()
    if dist.get_rank() == 1:
        found = [error_of(lambda: dist.all_reduce(torch.ones(2), group=group)) for _ in range(2)]
    meet()
    return found


@pytest.mark.beyond_gloo("gloo names no rank")
def test_the_timeout_of_a_group_names_the_absent_rank(pool: Pool) -> None:
    # The late rank's first call may still find what the other one left for it.
    (first, again), (_, late) = pool.run(group_timeout)
    assert "timeout" in first
    assert "rank 1" in first
    assert "all_reduce" in first
    assert "unusable" in again
    assert "rank 0" in late


def one_call() -> str:
    options = dist.AllreduceOptions()
    options.timeout = SHORT
    group = dist.new_group()
    text = ""
    if dist.get_rank() == 0:
        text = error_of(lambda: group.allreduce([torch.ones(2)], options).wait())
    meet()
    return text


def test_the_timeout_of_one_call(pool: Pool) -> None:
    text = pool.run(one_call)[0].lower()
    assert "timeout" in text


def one_wait() -> str:
    group = dist.new_group()
    text = ""
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        text = error_of(lambda: work.wait(SHORT))
    meet()
    return text


@pytest.mark.beyond_gloo("gloo names no rank")
def test_the_timeout_of_one_wait(pool: Pool) -> None:
    assert "timed out" in pool.run(one_wait)[0].lower()


def missing_message() -> str:
    group = dist.new_group(timeout=SHORT)
    text = ""
    if dist.get_rank() == 0:
        text = error_of(lambda: dist.recv(torch.ones(2), 1, group, tag=4))
    meet()
    return text


@pytest.mark.beyond_gloo("gloo names no tag")
def test_a_message_that_never_comes(pool: Pool) -> None:
    text = pool.run(missing_message)[0]
    for part in ("recv", "rank 1", "tag 4", "timeout"):
        assert part in text


def roll_call(wait_all: bool) -> tuple[str, float]:
    import dreamcomm

    rank = dist.get_rank()
    text = ""
    if rank in (0, 2):
        text = error_of(lambda: dreamcomm.monitored_barrier(None, SHORT, wait_all))
    total = torch.ones(1)
    dist.all_reduce(total)
    dreamcomm.monitored_barrier(None, timedelta(seconds=20), wait_all)
    return text, total.item()


@pytest.mark.beyond_gloo("dreamcomm's own")
@pytest.mark.parametrize("wait_all", [False, True])
def test_a_monitored_barrier_names_the_absent_ranks(pool: Pool, wait_all: bool) -> None:
    found = pool.run(roll_call, wait_all, world=4)
    texts = [text for text, _ in found]
    assert "failed to pass monitoredBarrier" in texts[0]
    assert ("Ranks 1, 3" if wait_all else "Rank 1") in texts[0]
    assert texts[2] != "no error"
    assert [total for _, total in found] == [4.0] * 4


def abort_waiting(kind: str) -> str:
    group = dist.new_group()
    text = ""
    if dist.get_rank() == 0:
        entered = threading.Event()

        def wait_for_peer() -> None:
            nonlocal text
            entered.set()
            if kind == "recv":
                text = error_of(lambda: dist.recv(torch.ones(2), 1, group))
            elif kind == "async":
                work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
                text = error_of(work.wait)
            else:
                text = error_of(lambda: dist.all_reduce(torch.ones(2), group=group))

        waiter = threading.Thread(target=wait_for_peer)
        waiter.start()
        entered.wait()
        group.abort()
        waiter.join()
    meet()
    return text


@pytest.mark.beyond_gloo("gloo cannot abort")
@pytest.mark.parametrize("kind", ["all_reduce", "async", "recv"])
def test_abort_from_another_thread_releases_the_waiter(pool: Pool, kind: str) -> None:
    text = pool.run(abort_waiting, kind)[0]
    assert "abort" in text.lower()


def abort_reaches_peers() -> str:
    group = dist.new_group()
    text = ""
    if dist.get_rank() == 0:
        group.abort()
    else:
        text = error_of(lambda: dist.all_reduce(torch.ones(2), group=group))
    meet()
    return text


@pytest.mark.beyond_gloo("gloo cannot abort")
def test_abort_releases_the_peers_too(pool: Pool) -> None:
    assert "rank 0" in pool.run(abort_reaches_peers)[1]


def leave_early() -> str:
    group = dist.new_group()
    text = ""
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)
    else:
        text = error_of(lambda: dist.all_reduce(torch.ones(2), group=group))
    meet()
    return text


@pytest.mark.beyond_gloo("gloo tells of a closed connection only")
def test_a_rank_that_left_is_named(pool: Pool) -> None:
    text = pool.run(leave_early)[1]
    assert "rank 0" in text
    assert "left the group" in text
