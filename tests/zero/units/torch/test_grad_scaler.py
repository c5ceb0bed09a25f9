"""torch's gradient scaler, whose decision is that of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.zero import GradScaler, ZeroOptimizer
from helpers.pool import Pool
from zero.units.sharding import weights
from zero.units.torch.beside import CLOSE, Beside, furthest, loss_of, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
STEPS = 7
BAD = (2, 3, 5)


def spoil(net: nn.Module) -> None:
    """An infinite element in the rows of one rank alone."""
    if dist.get_rank() == dist.get_world_size() - 1:
        grad: Any = next(net.parameters()).grad
        grad.to_local().view(-1)[0] = float("inf")


def scaled(own: bool, zero: bool, unscale: bool) -> tuple[float, list[float], list[float], int]:
    """The difference; the scales of both sides; how many steps changed weights."""
    beside = Beside.of(stack())
    options = {"init_scale": 2.0**10, "growth_interval": 2}
    kind = GradScaler if own else torch.amp.GradScaler
    scalers = [kind("cpu", **options), torch.amp.GradScaler("cpu", **options)]
    optimizers: list[torch.optim.Optimizer] = list(beside.steppers)
    if zero:
        optimizers[0] = ZeroOptimizer(
            beside.net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
        )
    scales, changed = [], 0
    for step in range(STEPS):
        before = weights(beside.net)
        for place, net in enumerate((beside.net, beside.alone)):
            optimizers[place].zero_grad()
            scalers[place].scale(loss_of(net, *beside.batches(step)[place])).backward()
        if step in BAD:
            spoil(beside.net)
            next(beside.alone.parameters()).grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
        for net, optimizer, scaler in zip(
            (beside.net, beside.alone), optimizers, scalers, strict=True
        ):
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        scales.append([scaler.get_scale() for scaler in scalers])
        changed += furthest(before, weights(beside.net)) > 0
    return beside.end(), [one for one, _ in scales], [one for _, one in scales], changed


@pytest.mark.parametrize(
    ("own", "zero", "unscale"),
    [(False, False, False), (False, False, True), (True, True, False), (True, True, True)],
)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_gradient_scaler(pool: Pool, own: bool, zero: bool, unscale: bool, world: int) -> None:
    for worst, ours, alone, changed in pool.run(scaled, own, zero, unscale, world=world):
        assert worst < CLOSE
        assert ours == alone == [1024.0, 2048.0, 1024.0, 512.0, 512.0, 256.0, 256.0]
        assert changed == STEPS - len(BAD)
