"""Small models, their data, and training without any communication to compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

WIDTH = 16
BATCH = 120  # of all ranks together; divisible by 2, 3, 4, 5 and 8
STEPS = 6

Optimizer = Callable[..., torch.optim.Optimizer]


class Mlp(nn.Module):
    """Three layers; with `skippable`, one more that not every step uses."""

    def __init__(self, skippable: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.middle = nn.Linear(4 * WIDTH, 4 * WIDTH)
        self.last = nn.Linear(4 * WIDTH, 1)
        self.skippable = nn.Linear(4 * WIDTH, 4 * WIDTH) if skippable else None

    def forward(self, x: torch.Tensor, skip: bool = True) -> torch.Tensor:
        x = functional.gelu(self.first(x))
        x = functional.gelu(self.middle(x))
        if self.skippable is not None and not skip:
            x = x + self.skippable(x)
        out: torch.Tensor = self.last(x)
        return out


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [BATCH, WIDTH] and targets [BATCH, 1] of all ranks together."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, x[:, :1] * x[:, 1:2] + x.sum(1, keepdim=True).sin()


def shard(data: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    return data.chunk(world)[rank]


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(out, target)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)  # type: ignore[arg-type]


def train_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, alternate: bool = False
) -> list[float]:
    """Losses of STEPS steps over the whole batches in this one process."""
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        out = model(x, skip=step % 2 == 0) if alternate else model(x)
        loss = loss_of(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
