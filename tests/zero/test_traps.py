"""Situations in which other sharded optimizers have gone wrong, with the right numbers given."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from ddp.models import batch, make, rows_of
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
stages = pytest.mark.parametrize("stage", [1, 2])


def sgd(module: nn.Module, stage: int, **options: Any) -> ZeroOptimizer:
    return ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=stage, **options)


def weight_model() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def accumulate(stage: int, case: str) -> float:
    """Gradients 1 and 3 on rank 0, 7 and 11 on rank 1: of two micro-batches the average is 11."""
    values = [[1.0, 3.0], [7.0, 11.0]][dist.get_rank()]
    model = weight_model()
    optimizer = sgd(model, stage, lr=1.0)
    for _ in range(2):  # the second time with learned buckets
        optimizer.zero_grad()
        nn.init.zeros_(model.weight)
        for number, value in enumerate(values):
            held = {"first": number == 0, "last": number == 1, "all": True, "none": False}[case]
            with optimizer.no_sync() if held else nullcontext():
                model(torch.tensor([[value]])).sum().backward()
        optimizer.step()
    return -model.weight.item()


@stages
@pytest.mark.parametrize("case", ["first", "last", "all", "none"])
def test_accumulated_gradients_are_averages(pool: Pool, stage: int, case: str) -> None:
    assert pool.run(accumulate, stage, case) == [11.0, 11.0]


def norms() -> list[float]:
    """Of one batch: by DDP, both stages, and one process."""
    rows = [rows_of(one, dist.get_rank(), dist.get_world_size()) for one in batch(0)]
    found = []
    for how in ("ddp", 1, 2):
        module: Any = make("mlp")
        clips = module = dreamcomm.DistributedDataParallel(module) if how == "ddp" else module
        if isinstance(how, int):
            clips = sgd(module, how, lr=0.1)
        nn.functional.mse_loss(module(rows[0]), rows[1]).backward()
        found.append(float(clips.clip_grad_norm_(1e9)))
    alone = make("mlp")
    x, y = batch(0)
    nn.functional.mse_loss(alone(x), y).backward()
    return [*found, float(nn.utils.clip_grad_norm_(alone.parameters(), 1e9))]


def test_there_is_one_gradient_norm(pool: Pool) -> None:
    for found in pool.run(norms, world=3):
        assert found[0] == found[1] == found[2] == pytest.approx(found[3], rel=1e-6)


def norm_over_steps(stage: int) -> list[tuple[float, float]]:
    """The norm of accumulated gradients in each of some steps, here and in one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module, alone = make("gpt"), make("gpt")
    optimizer = sgd(module, stage, lr=0.05)
    reference = torch.optim.SGD(alone.parameters(), lr=0.05)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        for micro in range(3):
            x, y = batch(3 * step + micro)
            nn.functional.mse_loss(alone(x), y).backward()
            x, y = (rows_of(one, rank, world) for one in (x, y))
            nn.functional.mse_loss(module(x), y).backward()
        norm = float(optimizer.clip_grad_norm_(0.1))
        found.append((norm, float(nn.utils.clip_grad_norm_(alone.parameters(), 0.1))))
        optimizer.step()
        reference.step()
    return found


@stages
def test_the_norm_of_accumulated_gradients_is_that_of_one_process(pool: Pool, stage: int) -> None:
    for found in pool.run(norm_over_steps, stage, world=3):
        for ours, theirs in found:
            assert ours == pytest.approx(theirs, rel=1e-5)


class Tied(nn.Module):
    """Two copies of one weight, at places of the list that are cut differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Parameter(torch.randn(37, 5))
        self.between = nn.Parameter(torch.randn(301, 7))
        self.second = nn.Parameter(self.first.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first.T).square().sum() + (x @ self.second.T).square().sum()


def copies(stage: int) -> tuple[bool, bool]:
    module, alone = Tied(), Tied()
    optimizer = sgd(module, stage, lr=1e-3, momentum=0.9)
    reference = torch.optim.SGD(alone.parameters(), lr=1e-3, momentum=0.9)
    for step in range(20):
        torch.manual_seed(100 + step)
        x = torch.randn(4, 5)
        for one, stepper, rows in (
            (module, optimizer, x[dist.get_rank() :: 4]),
            (alone, reference, x),
        ):
            stepper.zero_grad()
            (one(rows) / len(rows)).backward()
            stepper.step()
    same = torch.equal(module.first, module.second)
    return same, torch.allclose(module.first, alone.first, rtol=1e-5, atol=1e-6)


@stages
def test_copies_of_a_weight_stay_equal(pool: Pool, stage: int) -> None:
    assert pool.run(copies, stage, world=4) == [(True, True)] * 4


class Sometimes(nn.Module):
    """``a`` is used on all ranks, ``b`` on the last one, ``c`` on none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(6, 3)) for _ in range(3))

    def forward(self, last: bool) -> Tensor:
        return (self.a * 2).sum() + ((self.b * 4).sum() if last else 0.0)


def unused(stage: int) -> list[Tensor]:
    module = Sometimes()
    optimizer = sgd(module, stage, lr=1.0, momentum=0.5, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        module(dist.get_rank() == dist.get_world_size() - 1).backward()
        optimizer.step()
    assert module.c.grad is None
    return [one.detach().clone() for one in (module.a, module.b, module.c)]


@stages
def test_unused_parameters(pool: Pool, stage: int) -> None:
    """One that no rank uses does not move, and one that some use gets zeros of the others."""
    for a, b, c in pool.run(unused, stage):
        # w = 1; buf = g + 0.1 w; w -= buf; then buf = 0.5 buf + g + 0.1 w.
        for got, gradient in ((a, 2.0), (b, 2.0)):
            weight, buffer = 1.0, 0.0
            for step in range(2):
                buffer = (0.5 * buffer if step else 0.0) + gradient + 0.1 * weight
                weight -= buffer
            assert got.tolist() == [[pytest.approx(weight)] * 3] * 6
        assert c.tolist() == [[1.0] * 3] * 6


def clipped_by_torch(stage: int) -> list[str]:
    module = make("mlp")
    optimizer = sgd(module, stage, lr=0.1)
    x, y = (rows_of(one, dist.get_rank(), 2) for one in batch(0))
    nn.functional.mse_loss(module(x), y).backward()
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            nn.utils.clip_grad_norm_(module.parameters(), 0.01)
            optimizer.step()
        except RuntimeError as error:
            said.append(str(error))
    return said + [str(one.message) for one in caught]


def test_torchs_clipping_raises_at_stage_2(pool: Pool) -> None:
    for rank, (text,) in enumerate(pool.run(clipped_by_torch, 2)):
        assert f"rank {rank}:" in text
        assert "call ZeroOptimizer.clip_grad_norm_()" in text


def test_torchs_clipping_warns_at_stage_1(pool: Pool) -> None:
    for rank, (text,) in enumerate(pool.run(clipped_by_torch, 1)):
        assert f"on rank {rank}: the gradients of 6 parameters" in text
        assert "call ZeroOptimizer.clip_grad_norm_() instead" in text


def not_warned() -> int:
    """Steps with all that may be done to gradients."""
    module = make("mlp")
    optimizer = sgd(module, 1, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for clear in (True, False, True):
            for number in range(2):
                x, y = (rows_of(one, dist.get_rank(), 2) for one in batch(number))
                nn.functional.mse_loss(module(x), y).backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=clear)
    return len(caught)


def test_nothing_else_warns_at_stage_1(pool: Pool) -> None:
    assert pool.run(not_warned) == [0, 0]


def cleared(stage: int) -> list[float]:
    """Gradients that are cleared in each way, and not at all."""
    model = weight_model()
    optimizer = sgd(model, stage, lr=1.0)
    found = []
    for clear in (
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        model.zero_grad,
        lambda: model.zero_grad(set_to_none=False),
        lambda: None,
    ):
        clear()
        nn.init.zeros_(model.weight)
        model(torch.tensor([[float(1 + dist.get_rank())]])).sum().backward()
        optimizer.step()
        found.append(-model.weight.item())
    return found


@stages
def test_gradients_may_be_cleared_in_every_way(pool: Pool, stage: int) -> None:
    """Averages of 1 and 2; the last backward pass adds to the one before."""
    assert pool.run(cleared, stage) == [[1.5, 1.5, 1.5, 1.5, 3.0]] * 2
