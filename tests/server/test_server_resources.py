"""What servers and workers leave behind, and interrupts in every moment."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dreamcomm
from dreamcomm.server import ParameterServer, ServerError
from helpers.census import census
from helpers.memory import private_bytes
from helpers.pool import Fresh, Pool
from helpers.processes import replies
from server.serving import (
    PATIENCE,
    Board,
    Momentum,
    board_file,
    common_store,
    held_store,
    parameters,
    seconds,
    start_fast,
    worker,
)

ELEMENTS = 300_000
FIRST = 12  # joins before anything is counted


def held(store: Any) -> tuple[int, int, int, int]:
    """Descriptors, threads, keys of the store, and private bytes."""
    now = census()
    return now.descriptors, now.threads, store.num_keys(), private_bytes()


def serve_and_count(store: Any) -> Any:
    seen: list[Any] = []
    server = ParameterServer(
        parameters((ELEMENTS,)), Momentum, staleness=None, workers=4, store=store, timeout=PATIENCE
    )

    def on_update(one: ParameterServer) -> None:
        stays = one.report().workers.get(1)
        if stays is not None and stays.pushes > len(seen):
            seen.append(held(store))

    server.serve(on_update=on_update)
    return seen, dreamcomm.is_shared(dreamcomm.empty(ELEMENTS))


def stay(store: Any, others: dist.ProcessGroup) -> None:
    """Steps after the other one's joins, for the server to count then."""
    tensors = parameters((ELEMENTS,))
    tensors[0].grad = torch.ones(ELEMENTS)
    with worker(tensors, store=store, rank=1) as optimizer:
        alone = store.num_keys()
        for _ in range(2):
            dist.barrier(others)
            # The keys of a connection are deleted when its thread has ended.
            until = time.monotonic() + 10
            while store.num_keys() > alone and time.monotonic() < until:
                time.sleep(0.01)
            optimizer.step()
            dist.barrier(others)


def join_and_leave(store: Any, others: dist.ProcessGroup, joins: int) -> Any:
    seen = []
    for count in (FIRST, joins):
        for number in range(count):
            tensors = parameters((ELEMENTS,))
            tensors[0].grad = torch.ones(ELEMENTS)
            with worker(tensors, store=store, rank=2 + number % 3) as optimizer:
                optimizer.step()
        seen.append(held(store))
        dist.barrier(others)
        dist.barrier(others)
    return seen, dreamcomm.is_shared(dreamcomm.empty(ELEMENTS))


def come_and_go(joins: int) -> Any:
    store, others = common_store(), dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return serve_and_count(store)
    return stay(store, others) if dist.get_rank() == 1 else join_and_leave(store, others, joins)


def check_kept(fresh: Fresh, joins: int) -> None:
    # The heap has room for some 15 sets of parameters.
    env = {"DREAMCOMM_HEAP_BYTES": str(16 << 20)}
    server, _, late = fresh.run(come_and_go, joins, world=3, env=env, timeout=60 + joins)
    for (before, after), heap_has_room in (server, late):
        assert after[:2] == before[:2], "descriptors and threads"
        assert after[3] - before[3] < (4 << 20) + 1000 * joins, "bytes"
        assert heap_has_room
    (before, after), _ = server
    assert after[2] == before[2], "keys"


def test_joins_leave_nothing_behind(fresh: Fresh) -> None:
    check_kept(fresh, 25)


@pytest.mark.long
def test_a_thousand_joins_leave_nothing_behind(fresh: Fresh) -> None:
    check_kept(fresh, 1000)


def ended(staleness: int | None) -> Any:
    """Threads and descriptors of ranks whose server and worker have ended, again and again."""
    seen = []
    for number in range(4):
        store = common_store()
        tensors = parameters((ELEMENTS,))
        tensors[0].grad = torch.ones(ELEMENTS)
        if dist.get_rank() == 0:
            ParameterServer(
                tensors, Momentum, staleness=staleness, workers=1, store=store, name=str(number)
            ).serve()
        else:
            with worker(tensors, store=store, name=str(number)) as optimizer:
                optimizer.step()
        del store
        dist.barrier()
        seen.append(held(dist.HashStore())[:2])
    return seen


def test_a_server_that_has_ended_leaves_nothing_behind(fresh: Fresh) -> None:
    for seen in fresh.run(ended, 0):
        assert seen[1] == seen[2] == seen[3]


# Ctrl-C.


def interrupted(rank: int, address: str, folder: str) -> Any:
    """Ctrl-C in serve(), while one worker waits for an answer and another one computes."""
    start_fast()
    board, tensors = Board(f"{folder}/board"), parameters((5,))
    if rank == 0:
        server = ParameterServer(tensors, Momentum, staleness=0, workers=2, store=address)
        board[0] = 1
        try:
            server.serve()
        except KeyboardInterrupt:
            board[0] = 2
            return "interrupted", server.version
        return "", server.version
    optimizer = worker(tensors, store=address, rank=rank)
    tensors[0].grad = torch.ones(5)
    optimizer.step()
    board[rank] = 1
    if rank == 2:
        while board[0] != 2:  # with its step there would be an update
            time.sleep(0.001)
    found = seconds(optimizer.step, ServerError)
    return found[1:], time.monotonic() - board[3] / 1e9


def test_ctrl_c_in_serve_reaches_the_workers(fresh: Fresh, tmp_path: Path, slack: float) -> None:
    board = Board(board_file(tmp_path))
    with held_store() as address:
        ranks = fresh.start(interrupted, address, str(tmp_path), world=3, group=False)
        while not (board[1] and board[2]):
            time.sleep(0.001)
        board[3] = time.monotonic_ns()
        os.kill(ranks[0].pid, signal.SIGINT)
        found = [one.value for one in replies(ranks, PATIENCE)]
    assert found[0] == ("interrupted", 1)
    for (kind, text), took in found[1:]:
        assert kind == "ServerError"
        assert text == (
            "server 0 of 'server' has failed: the server was interrupted: KeyboardInterrupt"
        )
        assert took < 1.0 + slack


def later(pause: float) -> None:
    threading.Timer(pause, os.kill, (os.getpid(), signal.SIGINT)).start()


def interrupted_waiting() -> Any:
    """Ctrl-C in step(), which waits for another worker; then the step goes on."""
    rank, store = dist.get_rank(), common_store()
    others = dist.new_group([1, 2])
    tensors = parameters((5,))
    tensors[0].grad = torch.ones(5)
    if rank == 0:
        return ParameterServer(
            tensors, torch.optim.SGD, workers=2, store=store, timeout=PATIENCE, lr=1.0
        ).serve()
    with worker(tensors, store=store, rank=rank) as optimizer:
        if rank == 2:
            dist.barrier(others)
            optimizer.step()
            optimizer.step()
        else:
            later(0.2)
            kind = seconds(optimizer.step, KeyboardInterrupt)[1]
            again = seconds(optimizer.step, ServerError)
            back = optimizer.reconnect()
            dist.barrier(others)
            while optimizer.version < 2:
                optimizer.step()
            return kind, again[1:], back, float(tensors[0].detach().mean())
    return optimizer.version, float(tensors[0].detach().mean())


def test_ctrl_c_in_step_leaves_a_worker_that_can_go_on(pool: Pool) -> None:
    report, first, second = pool.run(interrupted_waiting, world=3)
    kind, (again, text), back, mean = first
    assert kind == "KeyboardInterrupt"
    assert again == "ServerLost"
    assert "server 0 of 'server' was left in the middle of a message; call reconnect()" in text
    assert back == 0
    assert mean == -2.0
    assert second == (2, -2.0)
    assert report.updates == 2


def interrupted_often(times: int) -> Any:
    """Ctrl-C at any time of large transfers: what is read afterwards is of one version."""
    rank, store = dist.get_rank(), common_store()
    tensors = parameters((ELEMENTS,), (3, ELEMENTS), (7,))
    if rank == 0:
        report = ParameterServer(
            tensors, torch.optim.SGD, staleness=None, workers=1, store=store, timeout=PATIENCE,
            lr=1.0,
        ).serve()  # fmt: skip
        return report.updates
    for one in tensors:
        one.grad = torch.ones_like(one)
    generator, hit = random.Random(3), 0
    torn = []
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    with (
        worker(tensors, store=store, rank=1) as optimizer,
        worker(tensors, store=store, rank=2) as steady,
    ):
        del steady  # keeps the server
        for _ in range(times):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.01 * generator.random())
                while signal.getitimer(signal.ITIMER_REAL)[0]:
                    optimizer.step()
                time.sleep(0.05)
            except KeyboardInterrupt:
                hit += 1
                optimizer.reconnect()
            optimizer.pull()  # also the answer to a push that no interrupt has cut
            expected = -float(optimizer.version)
            torn += [one for one in tensors if not bool((one == expected).all())]
            optimizer.step()  # a slow machine may finish none of those that are interrupted
    signal.signal(signal.SIGALRM, before)
    return hit, len(torn)


@pytest.mark.parametrize("times", [10, pytest.param(300, marks=pytest.mark.long)])
def test_ctrl_c_at_any_time_tears_nothing(pool: Pool, times: int) -> None:
    updates, (hit, torn) = pool.run(interrupted_often, times, timeout=60 + times)
    assert hit > times // 2
    assert torn == 0
    assert updates >= times
