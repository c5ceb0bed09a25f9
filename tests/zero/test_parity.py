"""ZeroOptimizer trains as dreamcomm's DistributedDataParallel does, with torch's optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from ddp.models import MODELS, batch, make, rows_of
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
}


def part(data: Tensor) -> Tensor:
    return rows_of(data, dist.get_rank(), dist.get_world_size())


def accumulate(module: nn.Module, step: int, micro: int, holds: Any) -> None:
    """The backward passes of one step; ``holds``: has the first ones add locally."""
    for number in range(micro):
        x, y = (part(one) for one in batch(step * micro + number))
        loss = nn.functional.mse_loss(module(x), y) / micro
        if number < micro - 1 and holds is not None:
            with holds.no_sync():
                loss.backward()
        else:
            loss.backward()


def by_ddp(
    name: str, optimizer: str, steps: int, clip: float | None, micro: int
) -> tuple[list[float], list[Tensor]]:
    module = dreamcomm.DistributedDataParallel(make(name), bucket_cap_mb=0.2)
    kind, options = OPTIMIZERS[optimizer]
    stepper = kind(module.parameters(), foreach=False, **options)
    norms = []
    for step in range(steps):
        stepper.zero_grad()
        accumulate(module, step, micro, module)
        if clip is not None:
            norms.append(float(module.clip_grad_norm_(clip)))
        stepper.step()
    return norms, [p.detach().clone() for p in module.parameters()]


def by_zero(
    name: str, optimizer: str, steps: int, clip: float | None, micro: int, **how: Any
) -> tuple[list[float], list[Tensor]]:
    module, wrap = make(name), how.pop("wrap", False)
    holds = how.pop("holds", True)
    if wrap:
        module = dreamcomm.DistributedDataParallel(module, bucket_cap_mb=0.2)
    kind, options = OPTIMIZERS[optimizer]
    stepper = ZeroOptimizer(module.parameters(), kind, **how, **options)
    norms = []
    for step in range(steps):
        stepper.zero_grad()
        accumulate(module, step, micro, stepper if holds else None)
        if clip is not None:
            norms.append(float(stepper.clip_grad_norm_(clip)))
        stepper.step()
    return norms, [p.detach().clone() for p in module.parameters()]


def both(
    name: str, optimizer: str, steps: int, clip: float | None, micro: int, how: dict[str, Any]
) -> Any:
    theirs = by_ddp(name, optimizer, steps, clip, micro)
    return theirs, by_zero(name, optimizer, steps, clip, micro, **how)


def check_equal(found: list[Any]) -> None:
    for (norms, weights), (zero_norms, zero_weights) in found:
        assert norms == zero_norms
        for one, other in zip(weights, zero_weights, strict=True):
            assert torch.equal(one, other), (one - other).abs().max()


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_bits_are_those_of_ddp(
    pool: Pool, name: str, optimizer: str, clip: float | None, stage: int, world: int
) -> None:
    check_equal(pool.run(both, name, optimizer, 5, clip, 1, {"stage": stage}, world=world))
