"""Gradients that a server's optimizer keeps belong to it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.memory import empty
from dreamcomm.server import ParameterServer, Worker, connection
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


class Extrapolated(torch.optim.Optimizer):
    """Steps with twice a gradient less the one before, which it keeps as it is."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                last = self.state[one].get("last", one.grad)
                one.sub_(group["lr"] * (2 * one.grad - last))
                self.state[one]["last"] = one.grad


def train(model: nn.Module, optimizer: Any) -> float:
    for step in range(4):
        optimizer.zero_grad()
        ((step + 1.0) * model(torch.ones(1, 4))).sum().backward()
        optimizer.step()
    return sum(one.sum().item() for one in model.parameters())


def served(staleness: int | None) -> list[float]:
    """The sum of the parameters, of a server and in one process."""
    model, alone = nn.Linear(4, 4), nn.Linear(4, 4)
    for one in (*model.parameters(), *alone.parameters()):
        nn.init.ones_(one)
    if dist.get_rank() == 0:
        server = ParameterServer(model.parameters(), Extrapolated, staleness=staleness, lr=0.1)
        server.serve()
        return []
    with Worker(model.parameters()) as worker:
        found = train(model, worker)
    return [found, train(alone, Extrapolated(alone.parameters(), 0.1))]


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_an_optimizer_may_keep_gradients(pool: Pool, staleness: int | None) -> None:
    found, expected = pool.run(served, staleness)[1]
    assert found == pytest.approx(expected, rel=1e-5)


def buffers_made(staleness: int | None) -> int:
    """How often a server makes buffers for four pushes, whose gradients its optimizer drops."""
    model = nn.Linear(4, 4)
    if dist.get_rank() == 0:
        with mock.patch.object(connection, "empty", side_effect=empty) as made:
            optimizer = torch.optim.SGD
            ParameterServer(
                model.parameters(), optimizer, staleness=staleness, lr=0.1, momentum=0.9
            ).serve()
        return int(made.call_count)
    with Worker(model.parameters()) as worker:
        train(model, worker)
    return 0


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_buffers_of_pushes_are_used_again(pool: Pool, staleness: int | None) -> None:
    assert pool.run(buffers_made, staleness)[0] == 1
