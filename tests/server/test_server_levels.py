"""A worker that loses one of two synchronous servers, and comes back to servers that are apart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dreamcomm.server import ParameterServer, ServerError
from helpers.pool import Pool
from server.serving import (
    Board,
    Momentum,
    board_file,
    common_store,
    differing,
    give_gradients,
    parameters,
    seconds,
    serve_rank,
    simulated,
    values,
    worker,
)

SHAPES = ((3000,), (2000,))  # one for each server
STEPS, BREAKS = 6, 2  # the connection is lost after update 2
FIRST, SECOND = 2, 3  # workers


def loses_one(when: str, alone: int, path: str) -> Any:
    """``alone``: the last update of server 0 that the other worker makes alone."""
    rank, store, board = dist.get_rank(), common_store(), Board(path)
    tensors = parameters(*SHAPES, value=0.5)

    def note(server: ParameterServer) -> None:
        board[rank] = server.version

    if rank < FIRST:
        return serve_rank(
            tensors, Momentum, workers=2, index=rank, servers=2, store=store, on_update=note
        ).version
    with worker(tensors, 2, store=store, rank=rank) as optimizer:
        while (version := optimizer.version) < STEPS:
            give_gradients(tensors, rank, version)
            if rank == FIRST and version == BREAKS:
                lose(optimizer._servers, when)
                while board[0] <= alone:  # as far as it can without this worker
                    time.sleep(0.001)
                optimizer.reconnect()
            while optimizer.version == version:
                optimizer.step()
        # Both stay until both have seen the last update.
        store.add("done", 1)
        while store.add("done", 0) < 2:
            time.sleep(0.01)
        return values(tensors), optimizer.report().steps


def lose(servers: Any, when: str) -> None:
    """As an interrupt does, before or after a push."""
    if when != "before the push":
        servers[1].push()
    if when == "after both pushes":
        servers[0].push()
    servers[0].visitor.forget()
    servers[0]._leave("is lost in a test; call reconnect()")


@pytest.mark.parametrize(
    ("when", "alone"),
    [
        # The updates of each server that the second worker makes alone.
        ("before the push", ([2], [2])),
        ("after one push", ([2, 3], [3])),
        ("after both pushes", ([3], [3])),
    ],
)
def test_a_worker_that_lost_one_goes_on_from_one_update(
    pool: Pool, tmp_path: Path, when: str, alone: tuple[list[int], list[int]]
) -> None:
    *versions, (first, _), (second, steps) = pool.run(
        loses_one, when, max(alone[0]), board_file(tmp_path), world=4
    )
    assert versions == [STEPS, STEPS]
    assert differing(first, second) == []
    assert steps == STEPS
    for number, updates in enumerate(alone):
        members = [[SECOND] if step in updates else [FIRST, SECOND] for step in range(STEPS)]
        tensors = parameters(*SHAPES, value=0.5)
        expected = simulated(tensors, Momentum(tensors), members)[-1]
        assert torch.equal(first[number], expected[number])


def starts_apart() -> Any:
    """Server 1 ends after its third update, and a new one has no checkpoint."""
    rank, store = dist.get_rank(), common_store()
    tensors = parameters(*SHAPES, value=0.5)
    if rank == 2:
        with worker(tensors, 2, store=store, rank=0) as optimizer:
            for step in range(2):
                give_gradients(tensors, 0, step)
                optimizer.step()
            told = seconds(optimizer.step, ServerError)
            found = seconds(optimizer.reconnect, ServerError)
            closed = seconds(optimizer.step, ServerError)
        return told[1], found[1:], closed[2]

    def end(server: Any) -> None:
        if rank == 1 and server.version == 3:
            server.stop()

    options: dict[str, Any] = {"workers": 1, "index": rank, "servers": 2, "store": store}
    serve_rank(tensors, Momentum, on_update=end, **options)
    if rank == 1:
        serve_rank(parameters(*SHAPES), Momentum, **options)
    return None


def test_servers_of_different_versions_are_refused(pool: Pool) -> None:
    _, _, (told, (kind, text), closed) = pool.run(starts_apart, world=3)
    assert (told, kind) == ("ServerError", "ServerError")
    assert "the synchronous servers are at the versions [3, 0]. Start all of them from" in text
    assert "was left by close()" in closed
