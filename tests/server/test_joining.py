"""Workers that join late, leave early, or only look on."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dreamcomm.server import ServerError
from helpers.pool import Pool
from server.serving import (
    Board,
    Momentum,
    board_file,
    common_store,
    differing,
    give_gradients,
    noted,
    parameters,
    seconds,
    serve_rank,
    simulated,
    values,
    worker,
)

SHAPES = ((1_800_000,), (3, 2), (200_000,), ())
STEPS, LATE = 7, 3


def await_flag(board: Board, place: int) -> None:
    while not board[place]:
        time.sleep(0.001)


def joins_and_leaves(path: str, servers: int) -> Any:
    """The first worker leaves before step 5, and the last one joins before step 3."""
    rank, world, store = dist.get_rank(), dist.get_world_size(), common_store()
    tensors, board = parameters(*SHAPES, value=0.5), Board(path)
    if rank < servers:
        with noted() as log:
            report = serve_rank(
                tensors, Momentum, workers=world - servers - 1, index=rank, servers=servers,
                store=store,
            )  # fmt: skip
        return report, log.texts()
    first, last = servers, world - 1
    if rank == last:
        await_flag(board, first)
    with worker(tensors, servers, store=store, rank=rank, timeout=10) as optimizer:
        if rank == last:
            assert optimizer.version == LATE
            board[last] = 1
        seen = {}
        for step in range(optimizer.version, 5 if rank == first else STEPS):
            if step == LATE and rank != last:
                board[rank] = 1
                await_flag(board, last)
            give_gradients(tensors, rank, step)
            optimizer.step()
            seen[step] = values(tensors)
    return seen


@pytest.mark.parametrize("servers", [1, 2])
def test_the_average_is_over_those_that_are_here(pool: Pool, tmp_path: Path, servers: int) -> None:
    found = pool.run(joins_and_leaves, board_file(tmp_path), servers, world=servers + 3)
    first, second, late = range(servers, servers + 3)
    members = [(first, second)] * LATE + [(first, second, late)] * 2 + [(second, late)] * 2
    tensors = parameters(*SHAPES, value=0.5)
    expected = simulated(tensors, Momentum(tensors), members)
    for seen in found[servers:]:
        for step, weights in seen.items():
            assert differing(weights, expected[step]) == [], step
    for index, (report, texts) in enumerate(found[:servers]):
        assert [report.workers[rank].pushes for rank in (first, second, late)] == [5, 7, 4]
        assert {one.state for one in report.workers.values()} == {"left"}
        words = f"server {index} of 'server': worker {late} has"
        assert [text for text in texts if f"worker {late} " in text] == [
            f"{words} joined", f"{words} left",
        ]  # fmt: skip


def starts_at_the_slowest(bound: int) -> Any:
    rank, store = dist.get_rank(), common_store()
    workers = dist.new_group([1, 2])
    tensors = parameters((5,))
    if rank == 0:
        return serve_rank(tensors, workers=2, store=store, staleness=bound)
    if rank == 1:
        with worker(tensors, store=store, rank=1, timeout=0.4) as optimizer:
            for step in range(10):
                give_gradients(tensors, 1, step)
                optimizer.step()
            dist.barrier(workers)
            dist.barrier(workers)
            for step in range(bound):
                give_gradients(tensors, 1, step)
                optimizer.step()
            found = seconds(optimizer.step, ServerError)
            dist.barrier(workers)
        return found[1], optimizer.report().staleness
    dist.barrier(workers)
    with worker(tensors, store=store, rank=2) as optimizer:
        dist.barrier(workers)
        dist.barrier(workers)
        return optimizer.version, optimizer.report().staleness


def test_a_late_worker_begins_where_the_slowest_is(pool: Pool) -> None:
    """One that began at 0 would hold back the first at once, and be 10 behind."""
    report, (kind, staleness), (version, of_late) = pool.run(starts_at_the_slowest, 2, world=3)
    assert kind == "ServerError"
    assert staleness == {0: 11, 1: 1, 2: 1}
    assert (version, of_late) == (10, {0: 1})
    # It closed while it waited: it has left, and is not lost.
    assert report.workers[1].state == "left"


def keep_joining(path: str, rounds: int) -> Any:
    """Ranks 2 and 3 train; rank 4 joins and leaves again and again. Two servers."""
    rank, store = dist.get_rank(), common_store()
    tensors, board = parameters((3000,), (50, 50), (400,)), Board(path)
    generator = random.Random(rank)
    if rank < 2:
        return serve_rank(tensors, index=rank, servers=2, workers=2, store=store, lr=0.01)
    seen: dict[int, float] = {}
    uneven = steps = 0

    def step_once(optimizer: Any) -> None:
        nonlocal uneven
        give_gradients(tensors, rank, steps)
        time.sleep(generator.random() * 0.001)
        optimizer.step()
        of_servers = {server.version for server in optimizer._servers}
        uneven += len(of_servers) > 1
        seen[optimizer.version] = sum(float(one.detach().double().sum()) for one in tensors)

    if rank == 4:
        for _ in range(rounds):
            with worker(tensors, 2, store=store, rank=4) as optimizer:
                uneven += len({server.version for server in optimizer._servers}) > 1
                for _ in range(generator.randrange(4)):
                    steps += 1
                    step_once(optimizer)
        board[4] = 1
        return seen, uneven
    with worker(tensors, 2, store=store, rank=rank) as optimizer:
        # Both make the same number of steps, so that none is alone at the end.
        while steps < 2 or not board[4] or steps % 50:
            steps += 1
            step_once(optimizer)
    return seen, uneven


def check_joins(pool: Pool, folder: Path, rounds: int) -> None:
    *_, first, second, late = pool.run(
        keep_joining, board_file(folder), rounds, world=5, timeout=300
    )
    for seen, uneven in (first, second, late):
        assert uneven == 0
        common = seen.keys() & first[0].keys()
        assert common, "they have trained together"
        for version in common:
            assert seen[version] == first[0][version], version


def test_a_late_worker_begins_at_one_update_on_both_servers(pool: Pool, tmp_path: Path) -> None:
    """Though others may have been between those of the one server and of the other."""
    check_joins(pool, tmp_path, 15)


@pytest.mark.long
def test_many_late_workers(pool: Pool, tmp_path: Path) -> None:
    check_joins(pool, tmp_path, 400)


def looks_on(staleness: int | None) -> Any:
    rank, store = dist.get_rank(), common_store()
    others = dist.new_group([1, 2])
    tensors = parameters((5,), (400_000,))
    if rank == 0:
        return serve_rank(tensors, workers=1, store=store, staleness=staleness, lr=1.0)
    if rank == 1:
        with worker(tensors, store=store, rank=0) as optimizer:
            dist.barrier(others)
            for one in tensors:
                one.grad = torch.ones_like(one)
            for _ in range(3):
                optimizer.step()
            dist.barrier(others)
            dist.barrier(others)
        return optimizer.report()
    optimizer = worker(tensors, store=store, observer=True)
    dist.barrier(others)
    dist.barrier(others)
    optimizer.pull()
    found = [optimizer.version, optimizer.rank, float(tensors[1].detach().max())]
    step = seconds(optimizer.step, RuntimeError)
    dist.barrier(others)
    time.sleep(0.3)  # the other one has left
    after = seconds(optimizer.pull, ServerError)
    return found, step, after, optimizer.report()


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_observer_holds_back_no_worker(pool: Pool, staleness: int) -> None:
    report, of_worker, (found, step, after, of_observer) = pool.run(looks_on, staleness, world=3)
    assert found == [3, -1, -3.0]
    assert step[1:] == ("RuntimeError", "Worker.step: an observer pushes nothing; call pull()")
    assert after[1:] == (
        "ServerError",
        "server 0 of 'server' has failed: all workers have left, and the server has ended",
    )
    assert list(report.workers) == [0]
    assert of_observer.pushed_bytes == 0
    assert of_observer.pulled_bytes == 2 * 4 * 400_005
    assert of_worker.steps == report.updates == 3
