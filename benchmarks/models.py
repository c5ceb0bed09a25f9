"""The two models whose training steps are timed, with synthetic data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dreamcomm.tools.demo.model import GPT, Shape, next_token_loss

# 25.2 million parameters; with 8 rows a step takes about 45 ms on one core of a server of 2023,
# so that the gradients weigh heavily against the arithmetic.
MLP_WIDTHS, MLP_ROWS = (1024, 4096, 1024, 4096, 1024, 4096, 1024), 8
# 10.0 million parameters, 256 tokens per rank and step: about 200 ms.
GPT_SHAPE, GPT_ROWS = Shape(layers=8, heads=5, width=320, context=64), 4

# 1,000 parameters of 1 KiB: what a wrapper does for each counts, not the bytes.
SMALL_TENSORS, SMALL_WIDTH = 1000, 256


@dataclass(frozen=True)
class Task:
    """A model, one rank's inputs, and the parts that FSDP2 shards one by one."""

    model: nn.Module
    parts: list[nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


def mlp(rows: torch.Generator) -> Task:
    layers = [nn.Linear(*widths) for widths in pairwise(MLP_WIDTHS)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    x, y = (torch.randn(MLP_ROWS, width, generator=rows) for width in MLP_WIDTHS[:: len(layers)])
    return Task(model, [*layers], x, y, F.mse_loss)


def gpt(rows: torch.Generator) -> Task:
    model = GPT(GPT_SHAPE)
    size = (GPT_ROWS, GPT_SHAPE.context + 1)
    tokens = torch.randint(GPT_SHAPE.vocabulary, size, generator=rows)
    return Task(model, [*model.blocks], tokens[:, :-1], tokens[:, 1:], next_token_loss)


class Scales(nn.Module):
    """Scales its input by many small vectors at once, so that it computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(SMALL_WIDTH) for _ in range(SMALL_TENSORS))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cat(list(self.vectors))


def small(rows: torch.Generator) -> Task:
    x, y = (torch.randn(SMALL_TENSORS * SMALL_WIDTH, generator=rows) for _ in range(2))
    model = Scales()
    return Task(model, [], x, y, F.mse_loss)


MODELS = {"mlp": mlp, "gpt": gpt, "small": small}


def make_task(name: str, rank: int) -> Task:
    """Equal weights in every call and on every rank; data of the rank's own."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1000 + rank)
    return MODELS[name](generator)
