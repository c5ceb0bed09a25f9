"""What torch's profiler sees of calls: whole, and nothing of them once its run is over."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from helpers.pool import Pool


def begin_calls() -> list[Any]:
    """Of plain tensors and of such as are staged, all under way together."""
    rank = dist.get_rank()
    works: list[Any] = []
    for _ in range(10):
        works.append(dist.all_reduce(torch.ones(10), async_op=True))
        works.append(dist.all_reduce(torch.ones(200, 100).t(), async_op=True))
        works.append(dist.isend(torch.ones(3000), 1 - rank))
        works.append(dist.irecv(torch.ones(60, 50).t(), 1 - rank))
    return works


def profiled() -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as run:
        dist.all_reduce(torch.ones(100))
        if dist.get_rank() == 1:
            time.sleep(0.1)  # so that rank 0 waits
        work = dist.broadcast(torch.ones(100), 1, async_op=True)
        assert work is not None
        work.wait()
    return [event.key for event in run.key_averages()]


def test_operations_show_in_torchs_profiler(pool: Pool) -> None:
    found = pool.run(profiled)
    for keys in found:
        assert "dreamcomm:all_reduce" in keys
        assert "dreamcomm:broadcast" in keys
    assert "dreamcomm:wait(broadcast)" in found[0]


def outlast_runs() -> list[int]:
    """How many operations each of rank 0's runs has seen, which end before any call does."""
    seen = []
    for _ in range(10):
        dist.barrier()
        run = profile(activities=[ProfilerActivity.CPU])
        run.start()
        if dist.get_rank() == 0:
            works = begin_calls()
            run.stop()
            seen.append(sum(event.name.startswith("dreamcomm:") for event in run.events()))
            del run
            kept = [{str(number): [number]} for number in range(20_000)]  # where it was
        else:
            time.sleep(0.1)
            works = begin_calls()
            run.stop()
        for work in works:
            work.wait()
        if dist.get_rank() == 0:
            assert all(kept[number] == {str(number): [number]} for number in range(20_000))
    return seen


def test_calls_may_outlast_a_run_of_the_profiler(pool: Pool) -> None:
    """A record that ended with its call would write to where the run was: to `kept`, say."""
    assert pool.run(outlast_runs)[0] == [40] * 10
