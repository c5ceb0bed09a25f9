"""Models of at most 300,000 parameters for pipelines, their data, and one process's training."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES, TOKENS, CONTEXT, WIDTH = 12, 50, 9, 48


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        sizes = [FEATURES, 120, 130, 110, 90, 100, 80, 70, 5]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers.append(nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh()))
        super().__init__(*layers)


class Cnn(nn.Sequential):
    """Batch norm, and in-place operations at the beginning of stages."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, 3, 4))]
        channels = [1, 8, 12, 16, 16, 12]
        for inputs, outputs in pairwise(channels):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers, nn.Flatten(), nn.Linear(144, 5))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.attention(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class Gpt(nn.Module):
    """Its output layer is its embedding, and a mask is made at the beginning."""

    def __init__(self, dropout: float = 0.0, blocks: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH, _weight=torch.randn(TOKENS, WIDTH) / 8)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 8)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        x = self.dropout(self.embedding(tokens) + self.position[:length])
        for block in self.blocks:
            x = block(x, mask=mask)
        return F.linear(self.norm(x), self.embedding.weight)


def regression(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def next_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def features(step: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(rows, FEATURES, generator=generator, dtype=dtype)
    return x, torch.randn(rows, 5, generator=generator, dtype=dtype)


def tokens(step: int, rows: int, _: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    drawn = torch.randint(TOKENS, (rows, CONTEXT + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


# Makes the model, its loss, and its data by step.
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "mlp": (Mlp, regression, features),
    "cnn": (Cnn, regression, features),
    "gpt": (Gpt, next_token, tokens),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().to(dtype)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def norm_of(module: nn.Module) -> float:
    grads = [one.grad for one in module.parameters() if one.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads))


class OneProcess:
    """Trains a model with micro-batches that accumulate, in one process."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.module = make(name, dtype)
        self.loss_fn, self.data = MODELS[name][1:]
        self.dtype = dtype

    def gradients(self, step: int, rows: int, micro: int, shares: int = 1) -> list[float]:
        """Sets the gradients of a step on `shares` pipelines' rows; returns the losses."""
        self.module.zero_grad()
        x, y = self.data(step, rows * shares, self.dtype)
        losses = []
        for xs, ys in zip(x.chunk(shares), y.chunk(shares), strict=True):
            for xm, ym in zip(xs.tensor_split(micro), ys.tensor_split(micro), strict=True):
                loss = self.loss_fn(self.module(xm), ym)
                (loss / (micro * shares)).backward()
                losses.append(float(loss.detach()))
        return losses

    def train(
        self, steps: int, rows: int, micro: int, shares: int = 1
    ) -> tuple[list[list[float]], list[float]]:
        """The losses and the gradients' norms of some steps."""
        optimizer = optimizer_of(self.module.parameters())
        losses, norms = [], []
        for step in range(steps):
            losses.append(self.gradients(step, rows, micro, shares))
            norms.append(norm_of(self.module))
            optimizer.step()
        return losses, norms
