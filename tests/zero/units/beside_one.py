"""What tests of scripts compare: some steps beside one process, and what an error says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp.models import batch
from zero.units.sharding import made, my_batch, weights

LR = 0.05


def loss_of(module: nn.Module, number: int, mine: bool = True) -> Tensor:
    x, y = my_batch(number) if mine else batch(number)
    return F.mse_loss(module(x), y)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)


def steps_beside_one_process(
    module: nn.Module, alone: nn.Module, loss: Callable[[nn.Module, int, bool], Tensor]
) -> float:
    """The largest difference of a weight after three steps."""
    ours, theirs = sgd(module), sgd(alone)
    for number in range(3):
        for optimizer, model, mine in ((ours, module, True), (theirs, alone, False)):
            optimizer.zero_grad()
            loss(model, number, mine).backward()
            optimizer.step()
    pairs = zip(weights(module), alone.parameters(), strict=True)
    return max(float((a - b.detach()).abs().max()) for a, b in pairs)


def one_step_is_right(module: Any) -> bool:
    """A step from the weights of now gives what one process gets."""
    name = "mlp"
    alone = made(name)
    for theirs, ours in zip(alone.parameters(), weights(module), strict=True):
        theirs.data.copy_(ours)
    return steps_beside_one_process(module, alone, loss_of) < 1e-6


def said(act: Callable[[], object]) -> str:
    try:
        act()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error)
    return "nothing"
