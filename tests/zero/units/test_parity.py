"""fully_shard trains as dreamcomm's DistributedDataParallel does, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dreamcomm
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from zero.units.sharding import SHARED, made, my_batch, shard, weights

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
}
WORLDS = [2, 3, 4]
Found = tuple[list[float], list[Tensor]]


def accumulate(module: nn.Module, step: int, micro: int, holds: Any) -> None:
    for number in range(micro):
        x, y = my_batch(step * micro + number)
        loss = nn.functional.mse_loss(module(x), y) / micro
        if number < micro - 1 and holds is not None:
            with holds.no_sync():
                loss.backward()
        else:
            loss.backward()


def by_ddp(name: str, optimizer: str, steps: int, clip: float | None, micro: int) -> Found:
    module = dreamcomm.DistributedDataParallel(made(name), bucket_cap_mb=0.2)
    kind, options = OPTIMIZERS[optimizer]
    stepper = kind(module.parameters(), foreach=False, **options)  # type: ignore[call-arg]
    norms = []
    for step in range(steps):
        stepper.zero_grad()
        accumulate(module, step, micro, module)
        if clip is not None:
            norms.append(float(module.clip_grad_norm_(clip)))
        stepper.step()
    return norms, [p.detach().clone() for p in module.parameters()]


def by_units(
    name: str, optimizer: str, steps: int, clip: float | None, micro: int, how: dict[str, Any]
) -> Found:
    module = shard(made(name), **how.get("options", {}))
    kind, options = OPTIMIZERS[optimizer]
    stepper: torch.optim.Optimizer
    if how.get("torch"):
        stepper = kind(module.parameters(), foreach=False, **options)  # type: ignore[call-arg]
    else:
        stepper = ZeroOptimizer(module.parameters(), kind, **options)
    norms = []
    for step in range(steps):
        stepper.zero_grad()
        accumulate(module, step, micro, module if how.get("holds", True) else None)
        if clip is not None:
            norms.append(float(module.clip_grad_norm_(clip)))
        stepper.step()
    return norms, weights(module)


def both(
    name: str, optimizer: str, steps: int, clip: float | None, micro: int, how: dict[str, Any]
) -> tuple[Found, Found]:
    theirs = by_ddp(name, optimizer, steps, clip, micro)
    return theirs, by_units(name, optimizer, steps, clip, micro, how)


def check_equal(found: list[tuple[Found, Found]]) -> None:
    for (norms, theirs), (our_norms, ours) in found:
        assert norms == our_norms
        assert len(theirs) == len(ours)
        for one, other in zip(theirs, ours, strict=True):
            assert torch.equal(one, other), (one - other).abs().max()


# Clipping asks more of a step than none does.
CLIPS = [(0.05, world) for world in WORLDS] + [
    pytest.param(None, world, marks=[] if world == 2 else pytest.mark.long) for world in WORLDS
]


@pytest.mark.parametrize(("clip", "world"), CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", SHARED)
def test_the_bits_are_those_of_ddp(
    pool: Pool, name: str, optimizer: str, clip: float | None, world: int
) -> None:
    check_equal(pool.run(both, name, optimizer, 5, clip, 1, {}, world=world))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "strange"])
def test_torchs_optimizers_have_the_bits_too(pool: Pool, name: str, optimizer: str) -> None:
    check_equal(pool.run(both, name, optimizer, 4, 0.05, 1, {"torch": True}, world=3))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["gpt", "tied"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_accumulated_gradients_have_the_bits_of_ddp(
    pool: Pool, name: str, clip: float | None, world: int
) -> None:
    """Four micro-batches, of which the first three are held back."""
    check_equal(pool.run(both, name, "sgd", 4, clip, 4, {}, world=world))


@pytest.mark.parametrize("world", WORLDS)
def test_accumulation_in_shards_is_close(pool: Pool, world: int) -> None:
    """Each micro-batch is reduced, so sums are rounded in another order: the same in each run."""
    how = {"holds": False}
    first, second = (pool.run(both, "gpt", "sgd", 4, 0.05, 4, how, world=world) for _ in range(2))
    for ((norms, theirs), ours), (_, again) in zip(first, second, strict=True):
        assert ours[0] == pytest.approx(norms, rel=1e-6)
        for one, other, repeated in zip(theirs, ours[1], again[1], strict=True):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)
            assert torch.equal(other, repeated)


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", SHARED)
def test_the_bits_are_those_of_ddp_after_100_steps(
    pool: Pool, name: str, optimizer: str, world: int
) -> None:
    check_equal(pool.run(both, name, optimizer, 100, 0.05, 1, {}, world=world, timeout=300))
    check_equal(pool.run(both, name, optimizer, 25, None, 4, {}, world=world, timeout=300))
    if name in ("mlp", "gpt", "strange"):
        how = {"torch": True}
        check_equal(pool.run(both, name, optimizer, 100, 0.05, 1, how, world=world, timeout=300))
