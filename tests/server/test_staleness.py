"""No worker runs ahead of the slowest by more than the bound, and one does run as far.

Workers count their pushes in memory that they share, each before it pushes. When a step returns, a
worker compares its count with the lowest. The server answered earlier, when counts were no higher,
so a difference above the bound is one that the server allowed.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helpers.pool import Pool
from server.serving import (
    Board,
    board_file,
    common_store,
    give_gradients,
    parameters,
    seconds,
    serve_rank,
    worker,
)

SHAPES = ((30,), (3, 2))


def run_ahead(path: str, bound: int | None, steps: int, pause: float, servers: int) -> Any:
    """The last rank pauses in each step; returns the differences seen, and the reports."""
    rank, world, store = dist.get_rank(), dist.get_world_size(), common_store()
    workers = dist.new_group(list(range(servers, world)))
    tensors = parameters(*SHAPES)
    if rank < servers:
        return serve_rank(
            tensors, workers=world - servers, index=rank, servers=servers, store=store,
            staleness=bound, lr=1e-3,
        )  # fmt: skip
    board, seen = Board(path), Counter[int]()
    with worker(tensors, servers, store=store, rank=rank) as optimizer:
        dist.barrier(workers)
        for step in range(steps):
            give_gradients(tensors, rank, step)
            if rank == world - 1:
                time.sleep(pause)
            board[rank] = step + 1
            optimizer.step()
            seen[step + 1 - min(board[one] for one in range(servers, world))] += 1
        board[rank] = 1 << 40  # holds back no other any more
        return seen, optimizer.report()


def check(found: list[Any], servers: int, bound: int, steps: int) -> None:
    reports, workers = found[:servers], found[servers:]
    for report in reports:
        assert max(report.staleness) == bound
        assert sum(report.staleness.values()) == len(workers) * (steps + 1)
        for rank, counts in report.workers.items():
            assert counts.pushes == steps, rank
    for seen, report in workers:
        assert max(seen) <= bound
        assert max(report.staleness) <= bound
        assert sum(report.staleness.values()) == servers * (steps + 1)
    assert max(max(seen) for seen, _ in workers[:-1]) == bound, "the bound is used"


@pytest.mark.parametrize("bound", [1, 3, 8])
def test_a_slow_worker_holds_the_others_at_the_bound(
    pool: Pool, tmp_path: Path, bound: int
) -> None:
    found = pool.run(run_ahead, board_file(tmp_path), bound, 100, 0.002, 1, world=3)
    check(found, 1, bound, 100)


@pytest.mark.long
@pytest.mark.parametrize(("bound", "servers"), [(1, 1), (3, 1), (8, 1), (3, 2)])
def test_ten_thousand_pulls_stay_within_the_bound(
    pool: Pool, tmp_path: Path, bound: int, servers: int
) -> None:
    """Three workers. A step of the others takes about 1 ms, and the slow one's 5."""
    steps = 3400
    found = pool.run(
        run_ahead, board_file(tmp_path), bound, steps, 0.005, servers, world=3 + servers,
        timeout=300,
    )  # fmt: skip
    check(found, servers, bound, steps)


def alone(bound: int | None, steps: int) -> Any:
    """One worker steps while the other does nothing."""
    rank, store = dist.get_rank(), common_store()
    workers = dist.new_group([1, 2])
    tensors = parameters(*SHAPES)
    if rank == 0:
        return serve_rank(tensors, workers=2, store=store, staleness=bound, lr=1e-3)
    with worker(tensors, store=store, rank=rank, timeout=1.0) as optimizer:
        dist.barrier(workers)
        if rank == 1:
            for step in range(steps):
                give_gradients(tensors, rank, step)
                optimizer.step()
            give_gradients(tensors, rank, steps)
            found = seconds(optimizer.step, RuntimeError)
            waited_for = optimizer.waits_for
        dist.barrier(workers)
        if rank == 2:
            give_gradients(tensors, rank, 0)
            optimizer.step()
            dist.barrier(workers)
            dist.barrier(workers)  # without it the other one would be ahead of none
            return optimizer.report()
        dist.barrier(workers)
        if bound is not None:
            optimizer.step()  # goes on with the step that was not answered
        dist.barrier(workers)
        return found, waited_for, optimizer.report()


@pytest.mark.parametrize("bound", [1, 4])
def test_one_that_is_ahead_waits_and_knows_for_whom(pool: Pool, bound: int) -> None:
    report, first, second = pool.run(alone, bound, bound, world=3)
    (took, kind, text), waited_for, counts = first
    assert kind == "ServerError"
    assert took >= 0.99
    assert text == (
        "server 0 of 'server' has not answered worker 1 within 1 s; it waits for the workers [2]"
    )
    assert waited_for == [2]
    assert counts.steps == bound + 1
    assert counts.staleness == dict.fromkeys(range(bound + 1), 1) | {bound: 2}
    assert report.workers[1].pushes == bound + 1, "the failed step is not pushed again"
    assert report.workers[1].waited > 0.9
    assert report.workers[2].waited < report.workers[1].waited
    assert second.staleness == {0: 2}


def test_without_a_bound_no_worker_waits(pool: Pool) -> None:
    report, first, second = pool.run(alone, None, 300, world=3)
    (_, kind, _), waited_for, counts = first
    assert (kind, waited_for) == ("", [])
    assert counts.staleness == dict.fromkeys(range(302), 1)
    assert report.staleness == counts.staleness + second.staleness
    assert report.lag == {0: 301, 301: 1}
    assert second.staleness == {0: 2}
