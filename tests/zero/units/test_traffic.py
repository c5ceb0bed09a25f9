"""Bytes that ranks move in a step, by their counters: gradients once, and no parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dreamcomm
from dreamcomm.zero import ZeroOptimizer, fully_shard
from dreamcomm.zero.units.window import KEY_BITS, MOST_BITS
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("counts what only dreamcomm counts")

WIDTH = 240  # divisible by 2, 3 and 4
MEETING = 2 * (KEY_BITS + 2) + MOST_BITS  # bytes for each peer


def moved(kind: str, micro: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Bytes sent and received in a step after the first, by operation, and those of parameters."""
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    nbytes = sum(one.nbytes for one in module.parameters())
    for part in (module[0], module[2], module):
        fully_shard(part)
    parameters = module.parameters()
    optimizer: torch.optim.Optimizer
    if kind == "torch":
        optimizer = torch.optim.AdamW(parameters, fused=True)
    else:
        optimizer = ZeroOptimizer(parameters, torch.optim.AdamW)
    before = after = dreamcomm.stats()
    for _ in range(2):
        optimizer.zero_grad()
        before = dreamcomm.stats()
        for _ in range(micro):
            with module.no_sync():
                module(torch.ones(2, WIDTH)).square().sum().backward()
        module(torch.ones(2, WIDTH)).square().sum().backward()
        optimizer.step()
        after = dreamcomm.stats()
    nothing = {"sent": 0, "received": 0}
    found = {}
    for name in after:
        old, new = before.get(name, nothing), after[name]
        change = new["sent"] - old["sent"], new["received"] - old["received"]
        if change != (0, 0):
            found[name] = change
    return found, nbytes


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", ["torch", "zero"])
@pytest.mark.parametrize("micro", [0, 3])
def test_gradients_move_once_and_parameters_never(
    pool: Pool, kind: str, micro: int, world: int
) -> None:
    for found, nbytes in pool.run(moved, kind, micro, world=world):
        one_way = nbytes * (world - 1) // world
        met = 2 * MEETING * (world - 1)
        assert found == {"reduce_scatter": (one_way, one_way), "all_reduce": (met, met)}
