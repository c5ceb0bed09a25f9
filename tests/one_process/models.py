"""Models, their batches, and what one process computes with the parts of a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dreamcomm.tools.demo.model import GPT, Shape

ROWS = 12
SHAPE = Shape(layers=2, heads=2, width=16, context=8)


class Tied(nn.Module):
    """One parameter in two places, one that is not used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.unused = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.middle.bias.requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.embed(tokens)).tanh())
        return out


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5)
    )


def gpt() -> nn.Module:
    return GPT(SHAPE)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 9, 4),
    )


def floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda random: torch.randn(ROWS, *shape, generator=random)


def tokens(count: int, length: int) -> Callable[[torch.Generator], Tensor]:
    return lambda random: torch.randint(count, (ROWS, length), generator=random)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "mlp": (mlp, floats(10)),
    "gpt": (gpt, tokens(SHAPE.vocabulary, 8)),
    "cnn": (cnn, floats(3, 8, 8)),
    "tied": (Tied, tokens(11, 4)),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name][0]()


def batch(name: str, step: int = 0) -> Tensor:
    return MODELS[name][1](torch.Generator().manual_seed(100 + step))


def loss_of(output: Tensor) -> Tensor:
    """A mean over all rows, with a gradient that differs in each element."""
    flat = output.flatten(1)
    wanted = torch.linspace(-1, 1, flat.numel(), dtype=flat.dtype).view_as(flat)
    return F.mse_loss(flat, wanted)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's operators with a single thread, here and so in each replica."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Step = tuple[Tensor, list[Tensor | None]]


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def step_of(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> Step:
    """The output, and the gradients that the module has afterwards."""
    module.zero_grad()
    output = call(x)
    loss_of(output).backward()
    return output.detach().clone(), gradients(module)


def in_parts(module: nn.Module, x: Tensor, count: int) -> Step:
    """One process that calls a copy on each part, and adds gradients in order."""
    copies = [copy.deepcopy(module) for _ in x.chunk(count)]
    for one in copies:
        one.zero_grad()
    output = torch.cat([one(part) for one, part in zip(copies, x.chunk(count), strict=True)])
    loss_of(output).backward()
    sums: list[Tensor | None] = []
    for found in zip(*(gradients(one) for one in copies), strict=True):
        total: Any = None
        for one in found:
            total = one if total is None else total if one is None else total + one
        sums.append(total)
    return output.detach(), sums


def same_bits(mine: Step, other: Step) -> bool:
    pairs = [(mine[0], other[0]), *zip(mine[1], other[1], strict=True)]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
