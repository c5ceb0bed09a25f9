"""Models of at most 300,000 parameters for parity tests, with data that ranks take by rows.

Some parameters are larger than what is reduced in place, and many are smaller.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 24  # of all ranks together; divisible by 2, 3 and 4
FEATURES = 12
TOKENS, CONTEXT = 40, 10


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 200), nn.Tanh(), nn.Linear(200, 210), nn.Tanh(), nn.Linear(210, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Gpt(nn.Module):
    """Its output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 96, _weight=torch.randn(TOKENS, 96) / 8)
        self.position = nn.Parameter(torch.randn(CONTEXT, 96) / 8)
        self.blocks = nn.Sequential(*(Block(96) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :CONTEXT].abs() * 1000).long() % TOKENS
        hidden = self.blocks(self.embedding(tokens) + self.position)
        return F.linear(hidden, self.embedding.weight).mean(1)[:, :5]


class Cnn(nn.Module):
    """With group norm, and weights in the memory order of channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.norm = nn.GroupNorm(4, 32)
        self.second = nn.Conv2d(32, 128, 3, padding=1)
        self.point = nn.Conv2d(128, 32, 1)
        self.head = nn.Linear(32, 5)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, 3, 4).contiguous(memory_format=torch.channels_last)
        image = F.relu(self.norm(self.first(image)))
        image = F.relu(self.point(F.relu(self.second(image))))
        out: Tensor = self.head(image.mean((2, 3)))
        return out


class Odd(nn.Module):
    """With shared, frozen and unused parameters, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, 190)
        self.shared = nn.Linear(190, 190)
        self.frozen = nn.Linear(190, 190)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(190, 190)
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(190, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.shared(torch.tanh(self.into(x))))
        hidden = torch.tanh(self.frozen(torch.tanh(self.shared(hidden))))
        out: Tensor = self.out(hidden) * self.scale
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": Mlp, "gpt": Gpt, "cnn": Cnn, "odd": Odd}


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights on every rank and in every call."""
    torch.manual_seed(7)
    return MODELS[name]().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs [ROWS, FEATURES] and targets [ROWS, 5] of all ranks together."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def rows_of(data: Tensor, rank: int, world: int) -> Tensor:
    return data.chunk(world)[rank]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def norm(model: nn.Module) -> float:
    """The 2-norm of all gradients, in float64."""
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())
