"""What comes right after a module was given new tensors: rewrite(), inference, an optimizer."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.zero import ZeroOptimizer, initialize
from dreamcomm.zero.units.parameters import region
from dreamcomm.zero.units.unit import unit_of
from helpers.pool import Pool
from zero.units.sharding import made, my_batch, shard, sharded, weights

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def slow_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank is late to put its rows into a region."""
    layout = region.shard_layout

    def late(*args: Any) -> Any:
        time.sleep(0.02)
        return layout(*args)

    if dist.get_rank() == dist.get_world_size() - 1:
        monkeypatch.setattr(region, "shard_layout", late)


def fill(module: nn.Module) -> None:
    for one in module.parameters():
        nn.init.normal_(one)


def initialised_late() -> bool:
    with torch.device("meta"):
        module = shard(nn.Sequential(nn.Linear(12, 64), nn.Linear(64, 5)))
    module.to_empty(device="cpu")
    with torch.no_grad():
        for one in module.parameters():
            one.zero_()
    with pytest.MonkeyPatch.context() as monkeypatch:
        slow_rows(monkeypatch)
        initialize(module, fill, seed=5)
    alone = nn.Sequential(nn.Linear(12, 64), nn.Linear(64, 5))
    torch.manual_seed(5)
    fill(alone)
    return all(map(torch.equal, weights(module), alone.parameters()))


def test_rewriting_waits_for_rows_of_all_ranks(pool: Pool) -> None:
    assert all(pool.run(initialised_late, world=3))


def inferred_first() -> tuple[Tensor, Tensor]:
    module, alone = sharded("mlp"), made("mlp")
    x, _ = my_batch(0)
    module.double()
    with torch.inference_mode():
        ours = module(x.double())
    module(x.double()).sum().backward()  # what it has made can be trained
    with torch.no_grad():
        return ours.clone(), alone.double()(x.double())


def test_inference_may_come_first_after_a_change(pool: Pool) -> None:
    for ours, theirs in pool.run(inferred_first, world=2):
        assert torch.equal(ours, theirs)


def stepped_after_a_change() -> bool:
    module: Any = sharded("mlp")
    module.double()
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    before = weights(module)
    x, y = my_batch(0)
    nn.functional.mse_loss(module(x.double()), y.double()).backward()
    found = [one.grad.full_tensor() for one in module.parameters()]
    optimizer.step()
    pairs = zip(weights(module), before, found, strict=True)
    return all(torch.allclose(now, old - 0.1 * grad) for now, old, grad in pairs)


def test_an_optimizer_is_made_after_a_change(pool: Pool) -> None:
    assert all(pool.run(stepped_after_a_change, world=2))


def freed_at_once() -> bool:
    """Whether parameters are freed with the module, without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        module: Any = sharded("mlp")
        unit = unit_of(module)
        assert unit is not None
        known = weakref.ref(unit.tree.records()[0].whole)
        loss = module(my_batch(0)[0]).sum()
        loss.backward()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.step()
        del module, unit, loss, optimizer
        return known() is None
    finally:
        gc.enable()


def test_parameters_are_freed_with_their_module(pool: Pool) -> None:
    assert all(pool.run(freed_at_once, world=2))
