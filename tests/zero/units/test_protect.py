"""With parameters that are mapped read-only a stray write faults where it is made."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from zero.units.sharding import my_batch, sharded
from zero.units.test_parity import both, check_equal

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

PROTECT = "DREAMCOMM_PROTECT_PARAMETERS"


def ends_a_child(act: Callable[[], object]) -> int:
    """The signal that ends a forked child which does it; 0: none."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        act()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def planted() -> dict[str, int]:
    """Writes that no version tells, while all ranks read and after."""
    module: Any = sharded("mlp")
    x, y = my_batch(0)
    loss = nn.functional.mse_loss(module(x), y)
    weight = module.layers[1 + 1].weight  # its unit has registered the DTensor again
    whole = next(iter(module._unit.tree.records())).whole
    found = {
        "whole parameter, by .data": ends_a_child(lambda: whole.data.add_(1.0)),
        "whole parameter, by numpy": ends_a_child(lambda: whole.detach().numpy().fill(1.0)),
        "rows, while ranks read": ends_a_child(
            lambda: torch._foreach_add_([weight.to_local().detach()], 1.0)
        ),
    }
    loss.backward()
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.step()
    found["rows, by an optimizer"] = ends_a_child(
        lambda: torch._foreach_add_([weight.to_local().detach()], 1.0)
    )
    return found


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_planted_write_faults(pool: Pool, level: int) -> None:
    whole = signal.SIGSEGV if level >= 1 else 0
    rows = signal.SIGSEGV if level >= 2 else 0
    for found in pool.run(planted, env={PROTECT: str(level)}):
        assert found == {
            "whole parameter, by .data": whole,
            "whole parameter, by numpy": whole,
            "rows, while ranks read": rows,
            "rows, by an optimizer": 0,
        }


@pytest.mark.parametrize("name", ["strange", "tied"])
def test_training_writes_nothing_it_must_not(pool: Pool, name: str) -> None:
    env = {PROTECT: "2"}
    for how in ({}, {"torch": True}):
        check_equal(pool.run(both, name, "adamw", 3, 0.05, 2, how, world=3, env=env))
