"""What torch's profiler sees of calls: whole, and nothing of them once its run is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from helpers.pool import Pool


def begin_dense() -> list[Any]:
    """Calls on plain tensors and on staged ones, all at the same time."""
    rank = dist.get_rank()
    works: list[Any] = []
    for _ in range(10):
        works.append(dist.all_reduce(torch.ones(10), async_op=True))
        works.append(dist.all_reduce(torch.ones(200, 100).t(), async_op=True))
        works.append(dist.isend(torch.ones(3000), 1 - rank))
        works.append(dist.irecv(torch.ones(60, 50).t(), 1 - rank))
    return works


def begin_named() -> list[Any]:
    with dist.record_comm("dreamcomm: gradients"):
        return begin_dense()


def begin_futures() -> list[Any]:
    """What callbacks do goes on after a call, on a thread of the library's."""

    def add(done: Any) -> Any:
        value = done.value()[0]
        for _ in range(100):
            value = value + 1
        return value

    works: list[Any] = []
    for _ in range(40):
        work: Any = dist.all_reduce(torch.ones(40, 3).t(), async_op=True)
        works.append(work.get_future().then(add))
    return works


def profiled() -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as run:
        dist.all_reduce(torch.ones(100))
        for _ in range(30):  # rank 0 usually waits before rank 1 has entered the call
            if dist.get_rank() == 1:
                time.sleep(0.02)
            work = dist.broadcast(torch.ones(20, 10).t(), 1, async_op=True)
            assert work is not None
            work.wait()
    return [event.key for event in run.key_averages()]


def test_operations_show_in_torchs_profiler(pool: Pool) -> None:
    found = pool.run(profiled)
    for keys in found:
        assert "dreamcomm:all_reduce" in keys
        assert "dreamcomm:broadcast" in keys
        assert "aten::copy_" not in keys  # of staged tensors, on another thread
    assert "dreamcomm:wait(broadcast)" in found[0]


def name_calls() -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as run, dist.record_comm("gradients"):
        dist.all_reduce(torch.ones(100))
        batch = [
            dist.P2POp(dist.isend, torch.ones(10), 1 - dist.get_rank()),
            dist.P2POp(dist.irecv, torch.ones(10), 1 - dist.get_rank()),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    return [event.name for event in run.events()]


@pytest.mark.skipif(not hasattr(dist, "record_comm"), reason="this torch names no calls")
def test_calls_show_under_the_callers_name(pool: Pool) -> None:
    for names in pool.run(name_calls):
        assert names.count("gradients") >= 3
        assert "dreamcomm:all_reduce" not in names


def outlast_runs(begin: Callable[[], list[Any]]) -> list[int]:
    """How many calls each of rank 0's runs has seen, which end before any call does."""
    seen = []
    for number in range(10):
        dist.barrier()
        run = profile(activities=[ProfilerActivity.CPU], profile_memory=number % 2 == 1)
        run.start()
        if dist.get_rank() == 0:
            works = begin()
            run.stop()
            seen.append(sum(event.name.startswith("dreamcomm:") for event in run.events()))
            del run
            kept = [{str(key): [key]} for key in range(20_000)]  # where it was
        else:
            time.sleep(0.1)
            works = begin()
            run.stop()
        for work in works:
            work.wait()
        if dist.get_rank() == 0:
            assert all(kept[key] == {str(key): [key]} for key in range(20_000))
    return seen


@pytest.mark.parametrize("begin", [begin_dense, begin_named, begin_futures])
def test_calls_may_outlast_a_run_of_the_profiler(
    pool: Pool, begin: Callable[[], list[Any]]
) -> None:
    """A record that ended with its call would write to where the run was: to `kept`, say."""
    if begin is begin_named and not hasattr(dist, "record_comm"):
        pytest.skip("this torch names no calls")
    assert pool.run(outlast_runs, begin)[0] == [40] * 10
