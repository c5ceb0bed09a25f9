"""dreamcomm.GradScaler: an infinity in one element of any rank has all ranks skip the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dreamcomm
from dreamcomm.pipeline import Pipeline
from helpers.pool import Pool
from training.loss_scaling import BAD, STEPS, WAYS, Found, in_pipelines, on_ranks, one_process

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def check(found: Found, expected: Found) -> None:
    assert found[0] == expected[0]
    for name, one in found[1].items():
        torch.testing.assert_close(one, expected[1][name], rtol=1e-5, atol=1e-6)


def test_one_process_skips_the_listed_steps() -> None:
    scales = [1024.0, *one_process()[0]]
    assert len(scales) == STEPS + 1
    assert [n for n in range(STEPS) if scales[n + 1] < scales[n]] == list(BAD)
    assert any(scales[n + 1] > scales[n] for n in range(STEPS))


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("way", [one for one in WAYS if one != "hybrid"])
def test_scales_are_those_of_one_process(pool: Pool, way: str, world: int, unscales: bool) -> None:
    for found, expected in pool.run(on_ranks, way, unscales, world=world):
        assert found[0] == expected[0]
        if unscales and way != "partial":  # which trains a parameter apart
            check(found, expected)


def test_hybrid_mesh(pool: Pool) -> None:
    for found, expected in pool.run(on_ranks, "hybrid", True, world=4):
        check(found, expected)


@pytest.mark.parametrize("way", ["ddp", "partial"])
def test_an_optimizer_that_divides_itself(pool: Pool, way: str) -> None:
    for (scales, _), (expected, _) in pool.run(on_ranks, way, False, fused=True):
        assert scales == expected


@pytest.mark.parametrize("pipes", [1, 2])
@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        ("1f1b", "sgd"),
        ("gpipe", "many"),
        ("interleaved1f1b", "sgd"),
        ("zb-h1", "sgd"),
        ("1f1b", "zero1"),
        ("zb-h1", "zero1"),
        ("1f1b", "zero2"),
        ("1f1b", "idle"),
    ],
)
def test_pipelines_skip_together(pool: Pool, schedule: str, how: str, pipes: int) -> None:
    for found, expected in pool.run(in_pipelines, schedule, how, pipes, world=2 * pipes):
        check(found, expected)


# Parameters of several groups, or of none, in one optimizer or in several.


class Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


def experts(how: str) -> list[tuple[float, float]]:
    """Scales, and sums of the weights that all ranks have, after each of three steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([one, one + 1]) for one in range(0, world, 2)]
    torch.manual_seed(0)
    dense, expert = nn.Linear(4, 4), nn.Linear(4, 4)
    wrapped: list[Any] = [dense, expert]
    if how == "sharded":
        dreamcomm.zero.fully_shard(dense)
    else:
        wrapped[0] = dreamcomm.DistributedDataParallel(dense)
    parameters = [list(dense.parameters()), list(expert.parameters())]
    optimizers: list[Any] = [torch.optim.SGD(one, lr=0.1) for one in parameters]
    if how == "zero":
        optimizers[1] = dreamcomm.zero.ZeroOptimizer(
            parameters[1], torch.optim.SGD, pairs[rank // 2], stage=2, lr=0.1
        )
    elif how not in ("local", "sharded"):
        wrapped[1] = dreamcomm.DistributedDataParallel(expert, process_group=pairs[rank // 2])
    if how == "together":
        optimizers = [torch.optim.SGD([*parameters[0], *parameters[1]], lr=0.1)]
    scaler, found = dreamcomm.GradScaler(init_scale=4.0), []
    for step in range(3):
        x = torch.ones(2, 4) * (rank + 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        of_dense, of_expert = (one(x) for one in wrapped)
        if step == 1 and rank == 0:
            of_expert = Infinite.apply(of_expert)  # type: ignore[no-untyped-call]
        scaler.scale(of_dense.sum() + of_expert.sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        weight: Any = dense.weight.detach()
        whole = weight.full_tensor() if how == "sharded" else weight
        found.append((scaler.get_scale(), float(whole.sum())))
    return found


@pytest.mark.parametrize("how", ["together", "apart", "zero", "local", "sharded"])
def test_ranks_of_several_groups_have_one_scale(pool: Pool, how: str) -> None:
    found = pool.run(experts, how, world=4)
    assert [scale for scale, _ in found[0]] == [4.0, 2.0, 2.0]
    assert found == [found[0]] * 4
    skips = found[0][1][1] == found[0][0][1]
    assert skips == (how == "together")  # optimizers skip their own steps, as in torch


# What is refused, on all ranks.


def told(how: str) -> str:
    rank = dist.get_rank()
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.ones(4, 3)
    given: Any = dreamcomm.GradScaler(init_scale=[8.0, 4.0][rank if how == "scales" else 0])
    if how == "torch":
        given = torch.amp.GradScaler("cpu")
    if how == "some":
        given = given if rank else None
    try:
        if how == "zero":
            given = dreamcomm.GradScaler(init_scale=[8.0, 4.0][rank])
            optimizer = dreamcomm.zero.ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
            given.scale(module(x).sum()).backward()
            given.step(optimizer)
            return ""
        pipe = Pipeline(module, 2, loss_fn=F.mse_loss, scaler=given)
        if how == "twice":
            given.scale(torch.ones(()))
        if how == "later":
            own = torch.optim.SGD(pipe.parameters(), lr=0.1)
            pipe.step(x, target=x)
            given.load_state_dict({**given.state_dict(), "scale": [8.0, 4.0][rank]})
            given.step(own)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("scales", "the ranks ask for different ones: scaler is GradScaler(8.0"),
        ("some", "the ranks ask for different ones: scaler is"),
        ("torch", "TypeError: Pipeline: expected scaler to be a dreamcomm.GradScaler"),
        ("twice", "RuntimeError: GradScaler.scale(): the Pipeline scales its losses itself"),
        ("zero", "RuntimeError: GradScaler: ranks have loss scales from 4.0 to 8.0"),
        ("later", "RuntimeError: GradScaler: ranks have loss scales from 4.0 to 8.0"),
    ],
)
def test_what_is_refused(pool: Pool, how: str, text: str) -> None:
    found = pool.run(told, how)
    assert any(text in one for one in found)
    assert all(found)


def losses() -> list[float]:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.manual_seed(0)
    for one in module.parameters():
        nn.init.normal_(one)
    scaler = dreamcomm.GradScaler(enabled=False)
    x = torch.ones(4, 3)
    found = []
    for given in (scaler, dreamcomm.GradScaler(init_scale=64.0)):
        pipe = Pipeline(module, 2, loss_fn=F.mse_loss, loss="all", scaler=given)
        losses: list[torch.Tensor] = []
        pipe.eval(x, target=x, losses=losses)
        found += [float(one) for one in losses]
        pipe.step(x, target=x, losses=losses)
        found += [float(one) for one in losses]
    return found


def test_losses_are_not_scaled_and_a_disabled_one_does_nothing(pool: Pool) -> None:
    for found in pool.run(losses):
        assert len(found) == 8
        assert len(set(found)) == 1


def test_the_device_is_the_accelerator_or_the_cpu() -> None:
    scaler = dreamcomm.GradScaler()
    expected = torch.accelerator.current_accelerator(check_available=True)
    assert scaler.scale(torch.ones(())) == 2.0**16
    assert scaler.is_enabled()
    assert scaler._device == ("cpu" if expected is None else expected.type)
