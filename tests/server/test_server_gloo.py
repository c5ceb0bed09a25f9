"""Servers and workers that share no memory: Gloo carries their messages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dreamcomm.server import ParameterServer, ServerError
from helpers.pool import Fresh, Pool
from server import test_lost_servers, test_lost_workers
from server.serving import (
    Momentum,
    common_store,
    differing,
    give_gradients,
    held_store,
    parameters,
    seconds,
    serve_rank,
    simulated,
    values,
    worker,
)

GLOO = {"DREAMCOMM_SHARED_MEMORY": "0"}
BOTH = pytest.mark.parametrize("env", [{}, GLOO], ids=["shared memory", "gloo"])
SHAPES = ((1_800_000,), (3, 2), (200_000,), ())


def train(servers: int, steps: int) -> Any:
    rank, world, store = dist.get_rank(), dist.get_world_size(), common_store()
    tensors = parameters(*SHAPES, value=0.5)
    if rank < servers:
        serve_rank(
            tensors, Momentum, workers=world - servers, index=rank, servers=servers, store=store
        )
        return None
    with worker(tensors, servers, store=store, rank=rank, gradients=True) as optimizer:
        assert "gloo" in optimizer._servers[0]._pair.transport  # type: ignore[union-attr]
        for step in range(steps):
            give_gradients(tensors, rank, step)
            optimizer.step()
    return values(tensors)


@pytest.mark.parametrize(
    ("workers", "servers"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.long)]
)
def test_the_bits_are_those_of_an_average(pool: Pool, workers: int, servers: int) -> None:
    found = pool.run(train, servers, 5, world=workers + servers, env=GLOO)
    ranks = range(servers, servers + workers)
    tensors = parameters(*SHAPES, value=0.5)
    expected = simulated(tensors, Momentum(tensors), [ranks] * 5)[-1]
    for weights in found[servers:]:
        assert differing(weights, expected) == []


@pytest.mark.parametrize("when", ["computing", pytest.param("in the push", marks=pytest.mark.long)])
def test_a_lost_worker(fresh: Fresh, tmp_path: Path, when: str, slack: float) -> None:
    server, workers, died = test_lost_workers.run(fresh, tmp_path, 0, when, env=GLOO)
    test_lost_workers.check_said(server, died, "", slack)
    for longest, _, report in workers:
        assert longest < 1.0 + slack
        assert report.steps == test_lost_workers.STEPS


def test_a_lost_server(fresh: Fresh, tmp_path: Path, slack: float) -> None:
    with held_store() as address:
        found = test_lost_servers.run(fresh, tmp_path, address, 1, GLOO, when="after the write")
    _, (first, _, _), workers = found
    test_lost_servers.check_equal(workers)
    assert first == test_lost_servers.FATAL
    for heard, _ in workers:
        [(late, text, index)] = heard
        assert late < 1.0 + slack
        assert index == 0
        assert "server 0 of 'server' is lost (" in text


def computes_long(pause: float, timeout: float) -> Any:
    """The server's timeout is shorter than what a worker computes, and another one waits for it."""
    rank, store = dist.get_rank(), common_store()
    tensors = parameters((3,))
    if rank == 0:
        return serve_rank(tensors, workers=2, store=store, timeout=timeout, lr=0.1)
    with worker(tensors, store=store, rank=rank) as optimizer:
        for step in range(2):
            give_gradients(tensors, rank, step)
            if rank == 1:
                time.sleep(pause)
            optimizer.step()
    return optimizer.report().steps


@BOTH
def test_a_worker_that_computes_for_long_is_not_lost(pool: Pool, env: dict[str, str]) -> None:
    report, *steps = pool.run(computes_long, 0.8, 0.5, world=3, env=env)
    assert steps == [2, 2]
    assert {one.state for one in report.workers.values()} == {"left"}


def stopped(how: str) -> Any:
    """The server ends at its update 2, while one worker waits and another computes."""
    rank, store, workers = dist.get_rank(), common_store(), dist.new_group([1, 2])
    tensors = parameters((3,), (1_600_000,))

    def on_update(server: ParameterServer) -> None:
        if server.version == 2:
            if how == "stop":
                server.stop()
            elif how == "exit":
                raise SystemExit(5)
            else:
                raise ArithmeticError("the schedule is wrong")

    if rank == 0:
        server = ParameterServer(tensors, Momentum, staleness=None, store=store, workers=2)
        found = seconds(lambda: server.serve(on_update=on_update), ArithmeticError, SystemExit)
        again = seconds(server.serve, RuntimeError)
        dist.barrier()  # it lives on
        return found, again, server.version
    optimizer = worker(tensors, store=store, rank=rank)
    dist.barrier(workers)  # without it the server might end before both are here
    if rank == 2:
        time.sleep(0.5)
    step = 0

    def train_on() -> None:
        nonlocal step
        while True:
            give_gradients(tensors, rank, step)
            optimizer.step()
            step += 1

    found = seconds(train_on, ServerError)
    again = seconds(optimizer.step, ServerError)
    dist.barrier()
    optimizer.close()
    return found[1:], again[1:]


@BOTH
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("stop", "", "the server has been stopped"),
        ("raise", "ArithmeticError", "the schedule is wrong"),
        ("exit", "SystemExit", "5"),
    ],
)
def test_all_workers_are_told_why_a_server_ends(
    pool: Pool, env: dict[str, str], how: str, kind: str, words: str
) -> None:
    (found, again, version), *workers = pool.run(stopped, how, world=3, env=env)
    assert found[1:] == (kind, words if kind else "")
    assert again[1:] == ("RuntimeError", "ParameterServer.serve: it has ended; make a new server")
    assert version == 2, "pushes after the end change nothing"
    for (error, text), (error_again, text_again) in workers:
        said = f"{kind}: {words}" if kind else words
        assert (error, text) == ("ServerError", f"server 0 of 'server' has failed: {said}")
        assert error_again == "ServerLost"
        assert "server 0 of 'server' has failed" in text_again
