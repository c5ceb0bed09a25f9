"""Workers that train apart in one process: what LocalSGD and DiLoCo have to equal."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

OuterStep = Callable[[list[Tensor], list[Tensor], list[Tensor]], None]


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def weights(module: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in module.parameters()]


class Normed(nn.Module):
    """Has statistics, and a number of batches."""

    def __init__(self, *, affine: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, affine=affine)
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.norm(x))
        return result


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 6, generator=generator)
    return x, torch.randn(8, 3, generator=generator) + x[:, :3]


def descend(module: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    x, y = batch(step, rank)
    optimizer.zero_grad()
    nn.functional.mse_loss(module(x), y).backward()
    optimizer.step()


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def local_sgd(world: int, steps: int, every: int, start: int) -> list[Tensor]:
    """Rank 0's parameters after so many steps."""
    modules = [model() for _ in range(world)]
    optimizers = [sgd(one) for one in modules]
    for step in range(1, steps + 1):
        for rank in range(world):
            descend(modules[rank], optimizers[rank], step, rank)
        if step <= start or (step - start) % every == 0:
            with torch.no_grad():
                for same in zip(*(one.parameters() for one in modules), strict=True):
                    mean = torch.stack([one.double() for one in same]).mean(0)
                    for one in same:
                        one.copy_(mean)
    return [one.detach().clone() for one in modules[0].parameters()]


def diloco(
    world: int,
    steps: int,
    every: int,
    runs: list[list[int]],
    overlap: int,
    alpha: float,
    wire: torch.dtype | None = None,
) -> list[list[Tensor]]:
    """Every rank's parameters, with an outer SGD of Nesterov momentum written out.

    Args:
        runs: the fragments, as numbers of parameters.
    """
    modules = [model() for _ in range(world)]
    optimizers = [sgd(one) for one in modules]
    lists = [list(one.parameters()) for one in modules]
    outer = [one.detach().double() for one in deepcopy(modules[0]).parameters()]
    momentum: list[Tensor | None] = [None] * len(outer)
    waiting: list[tuple[int, int, Tensor]] = []  # due, parameter, mean
    for step in range(1, steps + 1):
        for rank in range(world):
            descend(modules[rank], optimizers[rank], step, rank)
        for fragment, run in enumerate(runs):
            if (step - (fragment + 1) * every // len(runs)) % every == 0:
                for number in run:
                    ways = [outer[number].float() - one[number].detach() for one in lists]
                    if wire is not None:
                        ways = [way.to(wire) for way in ways]
                    mean = torch.stack([way.double() for way in ways]).mean(0)
                    if wire is not None:
                        mean = mean.to(wire).double()
                    waiting.append((step + overlap, number, mean))
        for _, number, mean in [one for one in waiting if one[0] == step]:
            old = momentum[number]
            new = mean.clone() if old is None else 0.9 * old + mean
            momentum[number] = new
            outer[number] = outer[number] - 0.7 * (mean + 0.9 * new)
            with torch.no_grad():
                for one in lists:
                    one[number].copy_(alpha * one[number].double() + (1 - alpha) * outer[number])
        waiting = [one for one in waiting if one[0] > step]
    return [[one.detach().clone() for one in of_rank] for of_rank in lists]
