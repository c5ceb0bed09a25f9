"""Optimizers beside one another, with closures, groups and schedules, on one root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, loss_of, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
HOW = pytest.mark.parametrize("zero", [False, True])
Make = Callable[..., torch.optim.Optimizer]


def makers(zero: bool) -> list[Make]:
    """Of the sharded module's optimizer, and of the other one."""

    def made(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        return ZeroOptimizer(parameters, torch.optim.SGD, **options)

    return [made if zero else torch.optim.SGD, torch.optim.SGD]


def split(net: nn.Module) -> list[list[nn.Parameter]]:
    named = list(net.named_parameters())
    return [[one for name, one in named if (name[0] in "02") is first] for first in (True, False)]


def two(zero: bool, alternate: bool) -> float:
    """Two optimizers share the parameters of one root; with ``alternate`` they take turns."""
    beside = Beside.of(stack())
    steppers = [
        [make(some, lr=lr, momentum=0.5) for some, lr in zip(split(net), (0.1, 0.05), strict=True)]
        for make, net in zip(makers(zero), (beside.net, beside.alone), strict=True)
    ]
    for step in range(4):
        for side in steppers:
            for one in side:
                one.zero_grad()
        beside.backward(step)
        beside.compare()
        for side in steppers:
            for one in side[step % 2 : step % 2 + 1] if alternate else side:
                one.step()
    return beside.end()


@HOW
@pytest.mark.parametrize("alternate", [False, True])
def test_two_optimizers(pool: Pool, zero: bool, alternate: bool) -> None:
    assert max(pool.run(two, zero, alternate)) < CLOSE


def closures(zero: bool) -> tuple[float, float]:
    """The optimizer itself runs the passes."""
    beside = Beside.of(stack())
    steppers = [
        make(net.parameters(), lr=0.1, momentum=0.5)
        for make, net in zip(makers(zero), (beside.net, beside.alone), strict=True)
    ]
    losses = []
    for step in range(3):
        for optimizer, net, data in zip(
            steppers, (beside.net, beside.alone), beside.batches(step), strict=True
        ):

            def closure(
                optimizer: Any = optimizer, net: Any = net, data: Any = data
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, *data)
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
        beside.compare()
    return beside.end(), min(losses)


@HOW
def test_closures(pool: Pool, zero: bool) -> None:
    for worst, loss in pool.run(closures, zero):
        assert worst < CLOSE
        assert loss > 0


def schedules(zero: bool) -> float:
    """Groups with options of their own, and rates that follow a schedule."""
    beside = Beside.of(stack())
    steppers, plans = [], []
    for make, net in zip(makers(zero), (beside.net, beside.alone), strict=True):
        first, second = split(net)
        groups = [{"params": first, "weight_decay": 0.1}, {"params": second, "lr": 0.02}]
        steppers.append(make(groups, lr=0.1, momentum=0.5))
        plans.append(torch.optim.lr_scheduler.StepLR(steppers[-1], 1, gamma=0.5))
    for step in range(4):
        for one in steppers:
            one.zero_grad()
        beside.backward(step)
        beside.compare()
        for one in (*steppers, *plans):
            one.step()
    return beside.end()


@HOW
def test_groups_and_schedules(pool: Pool, zero: bool) -> None:
    assert max(pool.run(schedules, zero, world=3)) < CLOSE


def made_before() -> tuple[str, float]:
    """An optimizer of the plain parameters is refused at its step, on all ranks."""
    net = stack()
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    beside = Beside.of(net)
    beside.backward(0)
    try:
        early.step()
    except RuntimeError as error:
        found = str(error)
    beside.compare()
    beside.step()
    return found, beside.run(range(1, 3)).end()


def test_an_optimizer_made_before(pool: Pool) -> None:
    for found, worst in pool.run(made_before):
        assert "'0.into.weight'" in found
        assert "after fully_shard" in found
        assert worst < CLOSE


def by_hand() -> float:
    """Without an optimizer: DTensors are written under no_grad, in place."""
    beside = Beside.of(stack())
    for step in range(3):
        beside.backward(step)
        beside.compare()
        for one in (*beside.net.parameters(), *beside.alone.parameters()):
            assert one.grad is not None
            with torch.no_grad():
                one.add_(one.grad, alpha=-0.1)
            one.grad = None
    return beside.end()


def test_steps_by_hand(pool: Pool) -> None:
    assert max(pool.run(by_hand, world=3)) < CLOSE
