"""Ways to use autograd and parameters, at both stages: as one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dreamcomm
from ddp.models import batch, make, rows_of
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
stages = pytest.mark.parametrize("stage", [1, 2])


class Twice(nn.Module):
    """A layer that is used twice; with reentrant checkpoints its gradient is made twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.reentrant = reentrant
        self.into, self.shared, self.out = (
            nn.Linear(12, 190),
            nn.Linear(190, 190),
            nn.Linear(190, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.into(x))
        for _ in range(2):
            hidden = torch.tanh(checkpoint(self.shared, hidden, use_reentrant=self.reentrant))
        out: Tensor = self.out(hidden)
        return out


def part(data: Tensor) -> Tensor:
    return rows_of(data, dist.get_rank(), dist.get_world_size())


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    take: Callable[[Tensor], Tensor],
    before: Callable[[nn.Module, int], None] = lambda module, step: None,
) -> list[Tensor]:
    for step in range(4):
        before(module, step)
        x, y = (take(one) for one in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


def beside_one_process(
    build: Callable[[], nn.Module],
    stage: int,
    before: Callable[[nn.Module, int], None] = lambda module, step: None,
    wraps: bool = False,
) -> float:
    """The largest difference of a weight."""
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    module, alone = build(), build()
    if wraps:
        module = dreamcomm.DistributedDataParallel(module)
    ours = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=stage, **options)
    theirs = torch.optim.SGD(alone.parameters(), **options)
    found = train(getattr(module, "module", module) if not wraps else module, ours, part, before)
    expected = train(alone, theirs, lambda data: data, before)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def twice(stage: int, reentrant: bool) -> float:
    return beside_one_process(lambda: Twice(reentrant), stage)


@stages
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gradient_that_is_made_twice(pool: Pool, stage: int, reentrant: bool) -> None:
    for difference in pool.run(twice, stage, reentrant, world=3):
        assert difference < 1e-5


def thaw(module: nn.Module, step: int) -> None:
    inner = getattr(module, "module", module)
    inner.layers[0].requires_grad_(step in (1, 3))


def thawed(stage: int, wraps: bool) -> float:
    def build() -> nn.Module:
        module = make("mlp")
        module.layers[0].requires_grad_(False)
        return module

    return beside_one_process(build, stage, thaw, wraps)


@stages
@pytest.mark.parametrize("wraps", [False, True])
def test_parameters_are_frozen_and_thawed(pool: Pool, stage: int, wraps: bool) -> None:
    for difference in pool.run(thawed, stage, wraps, world=3):
        assert difference < 1e-5


def copied(stage: int) -> bool:
    """A copy of the model between backward and step, as for an average of weights."""
    module = make("mlp")
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=stage, lr=0.1)
    x, y = (part(one) for one in batch(0))
    nn.functional.mse_loss(module(x), y).backward()
    other = copy.deepcopy(module)
    optimizer.step()
    moved = not torch.equal(other.layers[0].weight, module.layers[0].weight)
    nn.functional.mse_loss(other(x), y).backward()
    return moved


@stages
def test_a_model_can_be_copied(pool: Pool, stage: int) -> None:
    assert pool.run(copied, stage) == [True, True]


def norms(p: float) -> tuple[float, float, list[float]]:
    """Of ZeRO and of DDP, and what an infinity gives."""
    found = []
    for zero in (True, False):
        module: Any = make("gpt")
        clips: Any = module
        if zero:
            clips = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=2, lr=0.1)
        else:
            clips = module = dreamcomm.DistributedDataParallel(module)
        x, y = (part(one) for one in batch(0))
        nn.functional.mse_loss(module(x), y).backward()
        found.append(float(clips.clip_grad_norm_(1e9, p)))
    return found[0], found[1], []


@pytest.mark.parametrize("p", [1.0, 3.0, float("inf")])
def test_other_norms(pool: Pool, p: float) -> None:
    for ours, theirs, _ in pool.run(norms, p, world=3):
        assert ours == pytest.approx(theirs, rel=1e-5)


def not_finite(stage: int) -> tuple[str, bool]:
    module = make("mlp")
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=stage, lr=0.1)
    x, y = (part(one) for one in batch(0))
    factor = float("inf") if dist.get_rank() == 1 else 1.0
    (nn.functional.mse_loss(module(x), y) * factor).backward()
    try:
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error), True
    return "", False


@stages
def test_a_norm_that_is_not_finite_is_told_on_all_ranks(pool: Pool, stage: int) -> None:
    for rank, (text, raised) in enumerate(pool.run(not_finite, stage, world=3)):
        assert raised
        assert text.startswith(f"rank {rank}: the 2-norm of the gradients is ")
