"""Parameters of 16 bits with masters, and loss scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.models import batch, make, rows_of
from dreamcomm.zero import GradScaler, ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
stages = pytest.mark.parametrize("stage", [1, 2])


def part(data: Tensor) -> Tensor:
    return rows_of(data, dist.get_rank(), dist.get_world_size())


def scaled(
    stage: int, bad_rank: int, element: int, value: float, unscales: bool, plain: bool
) -> list[tuple[float, bool]]:
    """The loss scale, and whether the weights moved, after each of three steps."""
    module = make("mlp")
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=stage, lr=0.1)
    kind = torch.amp.GradScaler if plain else GradScaler
    scaler = kind("cpu", init_scale=8.0, growth_interval=100)
    weight = module.layers[2].weight
    found = []
    for step in range(3):
        optimizer.zero_grad()
        before = weight.detach().clone()

        def spoil(gradient: Tensor, step: int = step) -> Tensor:
            if step == 1 and dist.get_rank() == bad_rank:
                gradient = gradient.clone()
                gradient.view(-1)[element] = value
            return gradient

        handle = weight.register_hook(spoil)
        x, y = (part(one) for one in batch(step))
        scaler.scale(nn.functional.mse_loss(module(x), y)).backward()
        handle.remove()
        if unscales:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), not torch.equal(before, weight)))
    return found


@stages
@pytest.mark.parametrize("bad_rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("element", "value", "unscales"),
    [(0, float("inf"), False), (-1, float("nan"), False), (-1, float("inf"), True)],
)
def test_one_element_that_is_not_finite_has_all_ranks_skip(
    pool: Pool, stage: int, bad_rank: int, element: int, value: float, unscales: bool
) -> None:
    found = pool.run(scaled, stage, bad_rank, element, value, unscales, False, world=3)
    assert found == [[(8.0, True), (4.0, False), (4.0, True)]] * 3


@pytest.mark.parametrize("unscales", [False, True])
def test_torchs_scaler_is_right_at_stage_2(pool: Pool, unscales: bool) -> None:
    found = pool.run(scaled, 2, 1, -1, float("inf"), unscales, True, world=3)
    assert found == [[(8.0, True), (4.0, False), (4.0, True)]] * 3


def refused() -> str:
    try:
        scaled(1, 0, 0, float("inf"), False, True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_torchs_scaler_is_refused_at_stage_1(pool: Pool) -> None:
    for text in pool.run(refused):
        assert "use dreamcomm.zero.GradScaler" in text


def scaled_weights(stage: int | None) -> list[Tensor]:
    """With a loss scale of a power of two, and without one."""
    module = make("gpt")
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, stage=stage or 1, lr=1e-3)
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=stage is not None)
    for step in range(4):
        optimizer.zero_grad()
        x, y = (part(one) for one in batch(step))
        scaler.scale(nn.functional.mse_loss(module(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().clone() for p in module.parameters()]


@stages
def test_a_power_of_two_as_scale_changes_no_bit(pool: Pool, stage: int) -> None:
    plain, scaled_ = pool.run(scaled_weights, None), pool.run(scaled_weights, stage)
    for one, other in zip(plain, scaled_, strict=True):
        assert all(map(torch.equal, one, other))


def with_masters(stage: int, kind: str, steps: int) -> tuple[list[Tensor], list[Tensor], float]:
    """bfloat16 with float32 masters, beside one process in float32; and the largest difference."""
    module, alone = make("gpt").bfloat16(), make("gpt")
    with torch.no_grad():
        for one, other in zip(alone.parameters(), module.parameters(), strict=True):
            one.copy_(other)
    options: dict[str, Any] = {"lr": 0.005, "momentum": 0.9} if kind == "SGD" else {"lr": 1e-3}
    kind_class = getattr(torch.optim, kind)
    optimizer = ZeroOptimizer(
        module.parameters(), kind_class, stage=stage, master_dtype=torch.float32, **options
    )
    reference = kind_class(alone.parameters(), **options)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(part(x).bfloat16()).float(), part(y)).backward()
        optimizer.step()
        reference.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        reference.step()
    weights = [p.detach().clone() for p in module.parameters()]
    masters = [one.tensor.clone() for one in optimizer._ordered]
    rows = [one.rows(one.parameter.detach()) for one in optimizer._ordered]
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(masters, rows, strict=True))
    largest = max(
        float((one.float() - other).abs().max())
        for one, other in zip(weights, alone.parameters(), strict=True)
    )
    return weights, masters, largest


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_masters_have_the_bits_of_every_stage(pool: Pool, kind: str, world: int) -> None:
    """Parameters are the masters rounded, and stay within a band of float32's."""
    one, two = (pool.run(with_masters, stage, kind, 20, world=world) for stage in (1, 2))
    for (weights, masters, largest), (others, other_masters, _) in zip(one, two, strict=True):
        assert all(map(torch.equal, weights, others))
        assert all(map(torch.equal, masters, other_masters))
        assert largest < (0.02 if kind == "SGD" else 0.04)
    for weights, _, _ in one:  # all ranks have the same parameters
        assert all(map(torch.equal, weights, one[0][0]))


def summed(stage: int) -> tuple[float, float]:
    """Gradients of bfloat16 whose average bfloat16 cannot hold: the master gets it all the same."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.zeros_(model.weight)
    optimizer = ZeroOptimizer(
        model.parameters(), torch.optim.SGD, stage=stage, master_dtype=torch.float32, lr=1.0
    )
    value = [1.0, 1.0078125][dist.get_rank()]
    model(torch.tensor([[value]], dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    (shard,) = optimizer._ordered
    master = shard.tensor.item() if shard.tensor.numel() else float("nan")
    return master, model.weight.item()


@stages
def test_averages_are_computed_in_float32(pool: Pool, stage: int) -> None:
    (master, weight), (_, other) = pool.run(summed, stage)
    assert master == -1.00390625
    assert weight == other == -1.0  # rounded once, to even


def unscaled_after_averaging(stage: int) -> list[float]:
    """The norm of averages that were made before the scaler divides, with and without a scale."""
    norms = []
    for scale in (1.0, 256.0):
        module = make("mlp")
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=stage, lr=0.1)
        scaler = GradScaler("cpu", init_scale=scale)
        x, y = (part(one) for one in batch(0))
        scaler.scale(nn.functional.mse_loss(module(x), y)).backward()
        optimizer.reduce_gradients()
        scaler.unscale_(optimizer)
        norms.append(float(optimizer.clip_grad_norm_(1e9)))
    return norms


@stages
def test_averages_that_are_made_already_are_divided(pool: Pool, stage: int) -> None:
    for plain, scaled_ in pool.run(unscaled_after_averaging, stage):
        assert plain == scaled_


def float16_with_masters(stage: int) -> tuple[list[float], list[float], float]:
    """Norms of float16 gradients and of one process in float32; the largest difference of weights.

    A gradient of the loss would be below float16's smallest number without its scale.
    """
    module, alone = make("mlp").half(), make("mlp")
    with torch.no_grad():
        for one, other in zip(alone.parameters(), module.parameters(), strict=True):
            one.copy_(other)
    small = 1e-5
    optimizer = ZeroOptimizer(
        module.parameters(),
        torch.optim.SGD,
        stage=stage,
        master_dtype=torch.float32,
        lr=0.1 / small,
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.1 / small)
    scaler, norms, expected = GradScaler("cpu", init_scale=2.0**14), [], []
    for step in range(4):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(part(x).half()).float(), part(y))
        scaler.scale(small * loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(optimizer.clip_grad_norm_(1.0)))
        scaler.step(optimizer)
        scaler.update()
        reference.zero_grad()
        (small * nn.functional.mse_loss(alone(x), y)).backward()
        expected.append(float(nn.utils.clip_grad_norm_(alone.parameters(), 1.0)))
        reference.step()
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    return norms, expected, max(float((a.detach().float() - b).abs().max()) for a, b in pairs)


@stages
@pytest.mark.parametrize("world", [2, 3])
def test_float16_with_masters_is_divided_in_float32(pool: Pool, stage: int, world: int) -> None:
    for norms, expected, largest in pool.run(float16_with_masters, stage, world=world):
        assert norms == pytest.approx(expected, rel=0.02)
        assert largest < 0.01
