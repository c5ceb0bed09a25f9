"""Replicas within ranks: DistributedDataParallel around DataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import dreamcomm
from helpers.pool import Pool
from one_process.models import batch, loss_of, make

STEPS = 3


def train(name: str, way: str) -> tuple[list[Tensor], list[float]]:
    """Weights and losses of this rank, whose rows are its share of the batch."""
    module = make(name)
    wrapped: Any = dreamcomm.DataParallel(module, 2)
    if way == "torch":
        wrapped = DistributedDataParallel(wrapped, find_unused_parameters=name == "tied")
    elif way == "dreamcomm":
        wrapped = dreamcomm.DistributedDataParallel(wrapped)
    else:
        wrapped = dreamcomm.replicate(wrapped)
    if way == "zero":
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizer: Any = dreamcomm.zero.ZeroOptimizer(parameters, torch.optim.SGD, stage=1, lr=0.1)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = batch(name, step).chunk(dist.get_world_size())[dist.get_rank()]
        loss = loss_of(wrapped(rows))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()], losses


def alone(name: str, world: int) -> list[Tensor]:
    """One process that takes the mean over the ranks' rows."""
    module = make(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rows in batch(name, step).chunk(world):
            (loss_of(module(rows)) / world).backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("way", ["dreamcomm", "torch", "replicate"])
@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_ranks_of_replicas_train_as_one_process(pool: Pool, name: str, way: str) -> None:
    found = pool.run(train, name, way, world=2)
    expected = alone(name, 2)
    for weights, _ in found:
        for mine, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    for mine, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(mine, other)
