"""Gradients and state that a program discards, changes or lacks between passes and steps."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from ddp.models import batch, make, rows_of
from dreamcomm.zero import GradScaler, ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
stages = pytest.mark.parametrize("stage", [1, 2])


def weight_model() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def backward(model: nn.Module, value: float) -> None:
    model(torch.tensor([[value]])).sum().backward()


def discarded(stage: int, clear: bool) -> float:
    """Passes that reduce and that do not, cleared, and one more of 1 on rank 0 and 2 on rank 1."""
    model = weight_model()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=stage, lr=1.0)
    backward(model, 10.0)
    with optimizer.no_sync():
        backward(model, 20.0)
    optimizer.zero_grad(set_to_none=clear)
    backward(model, 1.0 + dist.get_rank())
    optimizer.step()
    return -model.weight.item()


@stages
@pytest.mark.parametrize("clear", [True, False])
def test_what_was_cleared_counts_no_more(pool: Pool, stage: int, clear: bool) -> None:
    assert pool.run(discarded, stage, clear) == [1.5, 1.5]


def replaced_gradient(stage: int) -> float:
    """The same, with another tensor in place of what was added up."""
    model = weight_model()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=stage, lr=1.0)
    backward(model, 10.0)
    with optimizer.no_sync():
        backward(model, 20.0)
    model.weight.grad = torch.full((1, 1), 1.0 + dist.get_rank())
    optimizer.step()
    return -model.weight.item()


@stages
def test_a_gradient_may_be_replaced(pool: Pool, stage: int) -> None:
    assert pool.run(replaced_gradient, stage) == [1.5, 1.5]


class Perhaps(nn.Module):
    """Uses its weight, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        return x * self.weight if uses else x * 1.0


def first_unused(stage: int) -> float:
    """In the first pass rank 1 uses no parameter, and both ranks use it in the others."""
    model = dreamcomm.DistributedDataParallel(Perhaps())
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=stage, lr=1.0)
    for step in range(3):
        optimizer.zero_grad()
        nn.init.zeros_(model.module.weight)
        x = torch.full((), 3.0, requires_grad=True)
        model(x, step > 0 or dist.get_rank() == 0).backward()
        optimizer.step()
    return -model.module.weight.item()


@stages
def test_a_rank_that_first_makes_no_gradient(pool: Pool, stage: int) -> None:
    assert pool.run(first_unused, stage) == [3.0, 3.0]


def discarded_and_unused(stage: int) -> float:
    """The same, with a last pass in which rank 1 alone uses the parameter."""
    model = weight_model()
    other = nn.Parameter(torch.zeros(()))
    parameters = [*model.parameters(), other]
    optimizer = ZeroOptimizer(parameters, torch.optim.SGD, stage=stage, lr=1.0)
    backward(model, 10.0)
    with optimizer.no_sync():
        backward(model, 20.0)
    optimizer.zero_grad()
    loss = other * 1.0
    if dist.get_rank() == 1:
        loss = loss + model(torch.ones(1, 1)).sum()
    loss.backward()
    optimizer.step()
    return -model.weight.item()


@stages
def test_a_rank_that_does_not_use_what_was_cleared(pool: Pool, stage: int) -> None:
    assert pool.run(discarded_and_unused, stage) == [0.5, 0.5]


def by_hand(stage: int) -> list[float]:
    """Gradients from torch.autograd.grad, clipped, in each of three steps."""
    model = weight_model()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=stage, lr=0.0)
    found = []
    for step in range(3):
        loss = model(torch.full((1, 1), 1.0 + step + dist.get_rank())).sum()
        (gradient,) = torch.autograd.grad(loss, [model.weight])
        model.weight.grad = gradient
        found.append(float(optimizer.clip_grad_norm_(100.0)))
        optimizer.step()
    return found


@stages
def test_gradients_may_be_set_by_hand(pool: Pool, stage: int) -> None:
    assert pool.run(by_hand, stage) == [[1.5, 2.5, 3.5]] * 2


def without_a_batch(stage: int, kind: str) -> float:
    """Rank 1 has no batch in the second step."""
    model = weight_model()
    optimizer = ZeroOptimizer(model.parameters(), getattr(torch.optim, kind), stage=stage, lr=1.0)
    for step in range(2):
        optimizer.zero_grad()
        nn.init.zeros_(model.weight)
        if step == 0 or dist.get_rank() == 0:
            with optimizer.no_sync() if stage == 2 else nullcontext():
                backward(model, 3.0)
        optimizer.clip_grad_norm_(100.0)
        optimizer.step()
    return -model.weight.item()


@stages
def test_a_rank_may_be_without_a_batch(pool: Pool, stage: int) -> None:
    """At stage 2 if all passes are held back; else a pass meets the other ranks' passes."""
    assert pool.run(without_a_batch, stage, "SGD") == [1.5, 1.5]


def scaled_in_part() -> float:
    """A pass that reduces and one that does not, with a loss scale of 8."""
    model = weight_model()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=2, lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.tensor([[1.0]])).sum()).backward()
    with optimizer.no_sync():
        scaler.scale(model(torch.tensor([[2.0]])).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return -model.weight.item()


def test_all_of_a_gradient_is_unscaled(pool: Pool) -> None:
    assert pool.run(scaled_in_part) == [3.0, 3.0]


class Fails(torch.autograd.Function):
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise MemoryError("out of memory")


def after_an_error(stage: int) -> bool:
    """Both ranks fail in a backward pass of the second step, and go on."""
    module, other = make("mlp"), make("mlp")
    optimizers = [
        ZeroOptimizer(one.parameters(), torch.optim.SGD, stage=stage, lr=0.1)
        for one in (module, other)
    ]
    for step in range(4):
        x, y = (rows_of(one, dist.get_rank(), dist.get_world_size()) for one in batch(step))
        for one, optimizer in zip((module, other), optimizers, strict=True):
            optimizer.zero_grad()
            if one is module and step in (0, 2):
                hidden = Fails.apply(one.layers[1](one.layers[0](x)))
                with pytest.raises(MemoryError):
                    nn.functional.mse_loss(one.layers[2:](hidden), y).backward()
                optimizer.zero_grad()
            nn.functional.mse_loss(one(x), y).backward()
            optimizer.step()
    return all(map(torch.equal, module.parameters(), other.parameters()))


@stages
def test_training_goes_on_after_an_error_in_backward(pool: Pool, stage: int) -> None:
    assert pool.run(after_an_error, stage) == [True, True]


def let_go(stage: int) -> bool:
    """A wrapper whose ZeroOptimizer is gone trains as one that never had one."""
    found = []
    for had in (True, False):
        module = dreamcomm.DistributedDataParallel(make("mlp"))
        if had:
            first = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=stage, lr=0.0)
            module(batch(0)[0]).sum().backward()
            first.step()
            first.zero_grad()
            del first
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            x, y = (rows_of(one, dist.get_rank(), 2) for one in batch(step))
            nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
        found.append([p.detach().clone() for p in module.parameters()])
    return all(map(torch.equal, *found))


@stages
def test_a_wrapper_goes_on_without_its_optimizer(pool: Pool, stage: int) -> None:
    assert pool.run(let_go, stage) == [True, True]


def replaced(how: str) -> bool:
    """State that is replaced between steps, as in a plain optimizer."""
    found = []
    for zero in (True, False):
        module = make("mlp")
        kind: Any = ZeroOptimizer if zero else torch.optim.AdamW
        given = (torch.optim.AdamW,) if zero else ()
        options = {} if zero else {"foreach": False}
        optimizer = kind(module.parameters(), *given, lr=1e-2, **options)
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(step)  # the same on all ranks, so averages are exact
            nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
            if step == 1 and how == "cleared":
                optimizer.state.clear()
            elif step == 1:
                for parameter in module.parameters():
                    state = optimizer.state[parameter]
                    state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        found.append([p.detach().clone() for p in module.parameters()])
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("how", ["cleared", "one"])
def test_state_may_be_replaced(pool: Pool, how: str) -> None:
    assert pool.run(replaced, how) == [True, True]


def not_copied() -> str:
    optimizer = ZeroOptimizer(make("mlp").parameters(), torch.optim.SGD)
    try:
        copy.deepcopy(optimizer)
    except TypeError as error:
        return str(error)
    return ""


def test_an_optimizer_is_not_copied(pool: Pool) -> None:
    for text in pool.run(not_copied):
        assert "save its state_dict()" in text
