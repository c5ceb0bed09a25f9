"""What tests of gossip share: ranks that train or only average, and the same in one process."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.gossip import Gossip
from dreamcomm.gossip.delays import damping, drawn_delay
from dreamcomm.gossip.weights import given_topology
from gossip.simulated import Simulated
from local_sgd.simulated import batch, model, sgd

PARTLY = [[0.6, 0.4, 0, 0], [0.4, 0.35, 0.25, 0], [0, 0.25, 0.25, 0.5], [0, 0, 0.5, 0.5]]
UNEQUAL = [[0.1, 0.9, 0], [0, 0.1, 0.9], [0.9, 0, 0.1]]  # messages in one direction


def flat(module: nn.Module) -> Any:
    """All parameters as an array."""
    parts = [one.detach().reshape(-1) for one in module.parameters()]
    return torch.cat(parts).numpy().copy()


def everyone(mine: Any) -> list[Any]:
    """By rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def descend(module: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    dtype = next(module.parameters()).dtype
    x, y = (one.to(dtype) for one in batch(step, rank))
    optimizer.zero_grad()
    nn.functional.mse_loss(module(x), y).backward()
    optimizer.step()


class Pauses:
    """Random ones, different in each run and rank; None: none."""

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else random.Random(1000 * seed + dist.get_rank())

    def __call__(self) -> None:
        if self._random is not None and self._random.random() < 0.4:
            time.sleep(self._random.random() * 0.008)


def train(steps: int, pauses: int | None, options: dict[str, Any]) -> tuple[Any, Any]:
    """Steps of SGD with momentum; this rank's parameters before and after finish()."""
    module, pause = model(), Pauses(pauses)
    optimizer = Gossip(module, sgd(module), **options)
    for step in range(1, steps + 1):
        pause()
        descend(module, optimizer, step, dist.get_rank())
    before = flat(module)
    optimizer.finish()
    return before, flat(module)


def simulated(world: int, steps: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """The same of all ranks, in one process and float64."""
    modules = [model().double() for _ in range(world)]
    optimizers = [sgd(one) for one in modules]

    def local(rank: int, step: int, x: Any) -> None:
        nn.utils.vector_to_parameters(torch.from_numpy(x), modules[rank].parameters())
        descend(modules[rank], optimizers[rank], step, rank)
        x[:] = flat(modules[rank])

    ranks = simulated_ranks([flat(one) for one in modules], options)
    for _ in range(steps):
        ranks.step(local)
    before = ranks.x.copy()
    ranks.finish()
    return before, ranks.x


def simulated_ranks(start: Any, options: dict[str, Any]) -> Simulated:
    bound, seed = options.get("bound", 0), options.get("seed", 0)
    topology = given_topology(options.get("topology", "ring"), options.get("weights"), len(start))

    def delay(rank: int, step: int) -> int:
        return drawn_delay(seed, rank, step, bound)

    return Simulated(topology.matrices, start, damping(topology.stretch, bound), delay)


class Apart:
    """Parameters that differ between ranks, and are not trained.

    Args:
        dtype: of the parameters.
        numel: their number.
        pull: how far a step moves them, in another direction on each rank.
    """

    def __init__(
        self,
        options: dict[str, Any],
        dtype: torch.dtype = torch.float32,
        numel: int = 3000,
        pull: float = 0.0,
    ) -> None:
        rank, cut = dist.get_rank(), [numel - 7]
        starts, directions = (np.split(made(rank, numel, what), cut) for what in (0, 1))
        self.module = nn.ParameterList(torch.zeros(len(one), dtype=dtype) for one in starts)
        optimizer = torch.optim.SGD(self.module.parameters(), pull)
        self.gossip = Gossip(self.module, optimizer, **options)
        for one, start, direction in zip(self.module, starts, directions, strict=True):
            one.detach().copy_(torch.from_numpy(start))
            one.grad = torch.from_numpy(direction).to(dtype)

    def __call__(self) -> Any:
        return np.concatenate([one.detach().double().numpy() for one in self.module])


def made(rank: int, numel: int, what: int) -> Any:
    """Random numbers."""
    return np.random.default_rng([rank, what]).standard_normal(numel)
