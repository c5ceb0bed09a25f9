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


WORLDS = [2, 3, 4]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_bits_are_those_of_ddp(
    pool: Pool, name: str, optimizer: str, clip: float | None, stage: int, world: int
) -> None:
    check_equal(pool.run(both, name, optimizer, 5, clip, 1, {"stage": stage}, world=world))


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_bits_are_those_of_ddp_after_100_steps(
    pool: Pool, name: str, optimizer: str, clip: float | None, world: int
) -> None:
    for stage in (1, 2):
        check_equal(
            pool.run(
                both, name, optimizer, 100, clip, 1, {"stage": stage}, world=world, timeout=200
            )
        )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", [{"stage": 1}, {"stage": 2}, {"stage": 2, "wrap": True}], ids=str)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_accumulated_gradients_have_the_bits_of_ddp(
    pool: Pool, how: dict[str, Any], clip: float | None, world: int
) -> None:
    """Four micro-batches, of which the first three are held back."""
    check_equal(pool.run(both, "gpt", "sgd", 4, clip, 4, how, world=world))


@pytest.mark.parametrize("world", WORLDS)
def test_accumulation_in_shards_is_close(pool: Pool, world: int) -> None:
    """Each micro-batch is reduced, so sums are rounded in another order: the same in each run."""
    how = {"stage": 2, "holds": False}
    first, second = (pool.run(both, "gpt", "sgd", 4, 0.05, 4, how, world=world) for _ in range(2))
    for ((norms, weights), ours), (_, again) in zip(first, second, strict=True):
        assert ours[0] == pytest.approx(norms, rel=1e-6)
        for one, other, repeated in zip(weights, ours[1], again[1], strict=True):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)
            assert torch.equal(other, repeated)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["gpt", "odd"])
def test_it_takes_over_the_buckets_of_a_wrapper(pool: Pool, name: str, stage: int) -> None:
    check_equal(pool.run(both, name, "adamw", 5, 0.05, 1, {"stage": stage, "wrap": True}, world=3))


def variants(kind: type[torch.optim.Optimizer], options: dict[str, Any], stage: int) -> Any:
    """Weights of DDP with the optimizer in its single-tensor form, and of ZeRO with it."""
    found = []
    for zero in (False, True):
        module: nn.Module = make("mlp")
        if zero:
            stepper: torch.optim.Optimizer = ZeroOptimizer(
                module.parameters(), kind, stage=stage, **options
            )
        else:
            module = dreamcomm.DistributedDataParallel(module)
            stepper = kind(module.parameters(), foreach=False, **options)  # type: ignore[call-arg]
        for step in range(5):
            stepper.zero_grad()
            accumulate(module, step, 1, None)
            stepper.step()
        found.append(([], [p.detach().clone() for p in module.parameters()]))
    return found


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 1e-3, "maximize": True, "betas": (0.4, 0.8)}),
        (torch.optim.SGD, {"lr": 0.01}),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
        (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
        (torch.optim.NAdam, {"lr": 1e-3}),
    ],
    ids=str,
)
def test_other_options_and_optimizers(
    pool: Pool, kind: type[torch.optim.Optimizer], options: dict[str, Any], stage: int
) -> None:
    """torch steps those on the shards that have no kernel."""
    check_equal(pool.run(variants, kind, options, stage, world=3))


def under_torch(unscales: bool | None) -> Any:
    """torch's DDP averages; stage 1 shards the optimizer's state alone.

    With a GradScaler unless ``unscales`` is None; it unscales before clipping, or in the step.
    """
    theirs = nn.parallel.DistributedDataParallel(make("gpt"))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3, foreach=False)
    module = nn.parallel.DistributedDataParallel(make("gpt"))
    stepper = ZeroOptimizer(module.parameters(), torch.optim.AdamW, reduce=False, lr=1e-3)
    norms: list[list[float]] = [[], []]
    scalers = [
        torch.amp.GradScaler("cpu", init_scale=1000.0, enabled=unscales is not None)
        for _ in range(2)
    ]
    for step in range(4):
        for who, (one, optimizer) in enumerate([(theirs, reference), (module, stepper)]):
            optimizer.zero_grad()
            x, y = (part(data) for data in batch(step))
            scalers[who].scale(nn.functional.mse_loss(one(x), y)).backward()
            if unscales is not False:
                scalers[who].unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(one.parameters(), 0.05)
                norms[who].append(float(norm))
            scalers[who].step(optimizer)
            scalers[who].update()
    weights = [[p.detach().clone() for p in one.parameters()] for one in (theirs, module)]
    return (norms[0], weights[0]), (norms[1], weights[1])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("unscales", [None, True, False])
def test_it_leaves_averages_to_torchs_wrapper(
    pool: Pool, unscales: bool | None, world: int
) -> None:
    check_equal(pool.run(under_torch, unscales, world=world))
