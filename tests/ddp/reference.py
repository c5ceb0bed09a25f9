"""What the hooks should give, in one process: every rank's gradients, rounded and added."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.models import batch, loss_of, sgd, shard

STEPS = 5
MICRO_BATCHES = 3


class Crossed(nn.Module):
    """Uses its layers in another order than it registers them: DDP rebuilds other buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(48, 1)
        self.first = nn.Linear(16, 64)
        self.middle = nn.Linear(64, 48)
        self.rare = nn.Linear(48, 48)

    def forward(self, x: Tensor, rarely: bool = True) -> Tensor:
        x = functional.gelu(self.middle(functional.gelu(self.first(x))))
        if rarely:
            x = x + self.rare(x)
        out: Tensor = self.last(x)
        return out


class Wire:
    """The exchange of one model's gradients in 16 bits, of all ranks at once."""

    def __init__(self, dtype: torch.dtype, feedback: bool, world: int) -> None:
        self.dtype = dtype
        self.world = world
        self.residuals: list[dict[int, Tensor]] | None = None
        if feedback:
            self.residuals = [{} for _ in range(world)]

    def sent(self, rank: int, place: int, gradient: Tensor) -> Tensor:
        if self.residuals is None:
            return gradient.to(self.dtype).float()
        value = gradient + self.residuals[rank].get(place, torch.zeros_like(gradient))
        sent = value.to(self.dtype).float()
        self.residuals[rank][place] = value - sent
        return sent

    def average(self, place: int, gradients: list[Tensor]) -> Tensor:
        total = self.sent(0, place, gradients[0])
        for rank in range(1, self.world):
            total = total + self.sent(rank, place, gradients[rank])
        return (total / self.world).to(self.dtype).float()


def pieces(step: int, rank: int, world: int, micro: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's share of a step's batch, in `micro` parts."""
    x, y = (shard(part, rank, world) for part in batch(step))
    yield from zip(x.chunk(micro), y.chunk(micro), strict=True)


def gradients_of(
    model: nn.Module, step: int, rank: int, world: int, micro: int, rarely: Callable[[int], bool]
) -> list[Tensor]:
    model.zero_grad(set_to_none=False)
    for x, y in pieces(step, rank, world, micro):
        loss_of(model(x, rarely(step)), y).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def train_reference(
    model: nn.Module,
    wire: Wire,
    micro: int = 1,
    rarely: Callable[[int], bool] = lambda step: True,
) -> list[Tensor]:
    """The weights after STEPS steps; a step without use of a layer leaves it alone."""
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        of_ranks = [
            gradients_of(model, step, rank, wire.world, micro, rarely) for rank in range(wire.world)
        ]
        for place, (name, parameter) in enumerate(model.named_parameters()):
            gradient = wire.average(place, [gradients[place] for gradients in of_ranks])
            unused = name.startswith("rare") and not rarely(step)
            parameter.grad = None if unused else gradient
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]
