"""Gradients of parameters that autograd makes of memory that a pipeline still uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dreamcomm.pipeline import Pipeline
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

LENGTH, WIDTH, ROWS = 5, 6, 6


class Added(torch.autograd.Function):
    """Gives the bias a view of the gradient that flows on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias[None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient[0]


class Position(nn.Module):
    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.position, self.by_function = nn.Parameter(torch.randn(LENGTH, WIDTH)), by_function

    def forward(self, x: Tensor) -> Tensor:
        if self.by_function:
            out: Tensor = Added.apply(x, self.position)
            return out
        return x + self.position[None]


def module(by_function: bool) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Position(by_function)) for _ in range(4)]
    return nn.Sequential(*blocks)


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, x.flip(0)


def gradients(by_function: bool, schedule: str) -> dict[str, Tensor]:
    pipe = Pipeline(module(by_function), ROWS, schedule=schedule, loss_fn=F.mse_loss, stages=4)
    x, y = batch()
    pipe.step(x, target=y)
    return {name: one.grad.clone() for name, one in pipe.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("by_function", [False, True], ids=["view", "function"])
@pytest.mark.parametrize(
    ("schedule", "world"), [("gpipe", 1), ("interleaved1f1b", 2), ("1f1b", 4), ("zb-h1", 4)]
)
def test_gradients_are_apart(pool: Pool, schedule: str, world: int, by_function: bool) -> None:
    whole = module(by_function)
    x, y = batch()
    for xm, ym in zip(x.split(1), y.split(1), strict=True):
        (F.mse_loss(whole(xm), ym) / ROWS).backward()
    found: dict[str, Tensor] = {}
    for one in pool.run(gradients, by_function, schedule, world=world):
        found |= one
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-7)
