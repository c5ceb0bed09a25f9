"""Weights that are tied by .data: on one server, with the bits of one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.server import ParameterServer, Worker
from helpers.pool import Pool
from server.serving import (
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


def made(tied: bool) -> list[nn.Parameter]:
    """Three parameters, of which the last is in the memory of the first."""
    tensors = parameters((4, 3), (5,), (4, 3), value=1.0)
    if tied:
        tensors[2].data = tensors[0].data
    return tensors


def served(staleness: int | None, steps: int) -> Any:
    """The numbers of parameters with other bits than in one process; ranks 0 and 1 serve."""
    rank, store = dist.get_rank(), common_store()
    tensors = made(True)
    if rank < 2:
        serve_rank(
            tensors, workers=1, store=store, index=rank, servers=2, staleness=staleness, lr=0.5
        )
        return None
    found = []
    with worker(tensors, 2, store=store, rank=0) as optimizer:
        for step in range(steps):
            give_gradients(tensors, 0, step)
            optimizer.step()
            found.append(values(tensors))
    alone = made(True)
    expected = simulated(alone, torch.optim.SGD(alone, lr=0.5), [[0]] * steps)
    return [differing(*two) for two in zip(found, expected, strict=True)]


@pytest.mark.parametrize("staleness", [0, None])
def test_tied_weights_have_the_bits_of_one_process(pool: Pool, staleness: int | None) -> None:
    assert pool.run(served, staleness, 3, world=3)[2] == [[]] * 3


def joined(tied: bool) -> str:
    """A server and a worker of which one has tied weights."""
    store = common_store()
    if dist.get_rank() == 0:
        serve_rank(made(not tied), workers=1, store=store, lr=0.5)
        return ""
    _, _, text = seconds(lambda: worker(made(tied), store=store), RuntimeError)
    worker(made(not tied), store=store).close()  # so that the server ends
    return text


@pytest.mark.parametrize("tied", [False, True])
def test_a_worker_with_other_ties_is_refused(pool: Pool, tied: bool) -> None:
    text = pool.run(joined, tied)[1]
    kinds = ["float32 [4, 3]", "float32 [4, 3] in the memory of parameter 0"]
    ours, theirs = kinds if tied else kinds[::-1]
    assert f"parameter 2 is {ours} on the server, and {theirs} on the worker" in text


@pytest.mark.parametrize("make", ["server", "worker"])
def test_what_overlaps_in_part_is_refused(make: str) -> None:
    store = dist.HashStore()
    whole, row = parameters((4, 3), (3,))
    row.data = whole.data[1]
    named = [("whole", whole), ("row", row)]

    def made_of(params: list[tuple[str, nn.Parameter]]) -> None:
        if make == "server":
            ParameterServer(params, torch.optim.SGD, workers=1, store=store, lr=0.1)
        else:
            Worker(params, store=store)

    with pytest.raises(ValueError, match="'whole' and 'row' overlap in memory"):
        made_of(named)


def test_one_memory_is_one_parameter_for_the_number_of_servers() -> None:
    with pytest.raises(ValueError, match="at most one server for each of 2 parameters, got 3"):
        ParameterServer(made(True), torch.optim.SGD, workers=1, servers=3, store="none:1", lr=0.1)
    with pytest.raises(ValueError, match="one for each of 2 parameters, got 3"):
        Worker(made(True), 3, store="none:1")
