"""What scripts do that sharing one copy could make wrong: each is right, or an error by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddp.models import batch
from dreamcomm.zero import fully_shard
from dreamcomm.zero.units.unit import unit_of
from helpers.pool import Pool
from zero.units.beside_one import (
    loss_of,
    one_step_is_right,
    said,
    sgd,
    steps_beside_one_process,
)
from zero.units.sharding import made, my_batch, shard, sharded, weights

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


# Errors on all ranks, after which the next step works.


def weights_swapped_while_read() -> tuple[str, bool]:
    """An evaluation with gradients leaves all ranks reading."""
    module = sharded("mlp")
    loss_of(module, 0)
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(one * 0.5)
    told = said(lambda: loss_of(module, 1).backward())
    module.reset_iter_state()
    return told, one_step_is_right(module)


def step_before_backward(keeps: bool) -> tuple[str, bool]:
    module = sharded("mlp")
    optimizer = sgd(module)
    loss_of(module, 0).backward()
    loss = loss_of(module, 1)
    if keeps:
        loss.backward(retain_graph=True)
    optimizer.step()
    told = said(loss.backward)
    module.reset_iter_state()
    optimizer.zero_grad()
    return told, one_step_is_right(module)


def first_rank_evaluates() -> tuple[str, bool]:
    module = sharded("mlp")
    loss_of(module, 0).backward()
    module.zero_grad()

    def act() -> None:
        if dist.get_rank() == 0:
            with torch.no_grad():
                loss_of(module, 1)
        loss_of(module, 0).backward()

    told = said(act)
    module.reset_iter_state()
    module.zero_grad()
    return told, one_step_is_right(module)


class Raises(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises and dist.get_rank() == 0:
            raise ValueError("a bad batch")
        out: Tensor = self.inner(x)
        return out


def forward_raises_on_one() -> tuple[str, bool]:
    inner = made("mlp")
    shard(inner.layers)
    module: Any = fully_shard(Raises(inner))
    loss_of(module, 0).backward()
    module.zero_grad()
    module.raises = True
    told = said(lambda: loss_of(module, 0).backward())
    module.raises = False
    module.reset_iter_state()
    module.zero_grad()
    return told, one_step_is_right(module)


ERRORS: dict[str, tuple[Callable[..., tuple[str, bool]], tuple[Any, ...], str]] = {
    "weights swapped": (weights_swapped_while_read, (), "has written to 'layers.0.weight'"),
    "step before backward": (step_before_backward, (False,), "modified by an inplace operation"),
    "graph kept over a step": (step_before_backward, (True,), "modified by an inplace operation"),
    "one rank evaluates": (first_rank_evaluates, (), "made different calls"),
    "one rank raises": (forward_raises_on_one, (), "made different calls"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_on_all_ranks(pool: Pool, name: str) -> None:
    act, args, words = ERRORS[name]
    found = pool.run(act, *args)
    for told, _ in found:
        assert words in told or told == "a bad batch", told
    assert [goes_on for _, goes_on in found] == [True, True]


# Right as they are.


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.reentrant = reentrant
        self.layers = nn.ModuleList([nn.Linear(12, 64), nn.Linear(64, 64), nn.Linear(64, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


def preference(module: nn.Module, number: int, mine: bool) -> Tensor:
    """Two forward passes, and one without gradients between them."""
    x, y = my_batch(number) if mine else batch(number)
    x = x.clone().requires_grad_()
    chosen = module(x)
    with torch.no_grad():
        reference = module(x)
    rejected = module(x * 0.5)
    return F.mse_loss(chosen - rejected + reference, y)


def two_forwards_with_checkpoints(reentrant: bool) -> float:
    module, alone = Checkpointed(reentrant), Checkpointed(reentrant)
    for layer in module.layers:
        fully_shard(layer)
    return steps_beside_one_process(fully_shard(module), alone, preference)


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_with_checkpoints(pool: Pool, reentrant: bool) -> None:
    for difference in pool.run(two_forwards_with_checkpoints, reentrant, world=3):
        assert difference < 1e-6


class WithHead(nn.Module):
    """Its head is called by chunks, outside of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body, self.norm, self.head = nn.Linear(12, 64), nn.LayerNorm(64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.tanh(self.body(x)))
        return out


def by_chunks(module: Any, number: int, mine: bool) -> Tensor:
    x, y = my_batch(number) if mine else batch(number)
    hidden = module(x)
    parts = zip(hidden.chunk(3), y.chunk(3), strict=True)
    total = sum(F.mse_loss(module.head(h), part, reduction="sum") for h, part in parts)
    assert isinstance(total, Tensor)
    return total / y.numel()


def chunked_head(together: bool) -> float:
    module, alone = WithHead(), WithHead()
    fully_shard(module.body)
    fully_shard([module.norm, module.head] if together else module.head)
    return steps_beside_one_process(fully_shard(module), alone, by_chunks)


@pytest.mark.parametrize("together", [False, True])
def test_a_head_that_is_called_by_chunks(pool: Pool, together: bool) -> None:
    for difference in pool.run(chunked_head, together):
        assert difference < 1e-6


def adversaries() -> float:
    """Two trees, each stepped by a loss that goes through both."""
    pairs = [[made("mlp"), nn.Linear(5, 12)] for _ in range(2)]
    for (generator, discriminator), mine in zip(pairs, (True, False), strict=True):
        torch.manual_seed(5)
        discriminator.reset_parameters()
        if mine:
            shard(generator)
            fully_shard(discriminator)
        optimizers = [sgd(generator), sgd(discriminator)]
        for number in range(4):
            x, _ = my_batch(number) if mine else batch(number)
            made_up = generator(x)
            real = discriminator(made_up.detach()).square().mean()
            fooled = (discriminator(made_up) - 1).square().mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            (real if number % 2 else fooled).backward()
            optimizers[number % 2].step()
    ours = [one for module in pairs[0] for one in weights(module)]
    theirs = [one.detach() for module in pairs[1] for one in module.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def test_two_trees_in_one_loss(pool: Pool) -> None:
    for difference in pool.run(adversaries):
        assert difference < 1e-6


def penalty(module: nn.Module, number: int, mine: bool) -> Tensor:
    """A loss of a gradient, as of a gradient penalty."""
    x, y = my_batch(number) if mine else batch(number)
    x = x.clone().requires_grad_()
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + slope.square().mean()


def with_penalty() -> float:
    return steps_beside_one_process(sharded("mlp"), made("mlp"), penalty)


def test_a_loss_of_gradients(pool: Pool) -> None:
    for difference in pool.run(with_penalty, world=3):
        assert difference < 1e-6


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.into, self.first, self.second = nn.Linear(12, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.out = nn.Linear(64, 5)

    def tie_weights(self) -> None:
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(torch.tanh(self.into(x))))))
        out: Tensor = self.out(hidden)
        return out


def tied_after_wrapping(runs_before: bool) -> tuple[float, int]:
    module, alone = Untied(), Untied()
    for part in (module.first, module.second):
        fully_shard(part)
    fully_shard(module)
    if runs_before:
        with torch.no_grad():
            module(my_batch(0)[0])
    for model in (module, alone):
        model.tie_weights()
    difference = steps_beside_one_process(module, alone, loss_of)
    assert module.first.weight is module.second.weight
    unit = unit_of(module)
    assert unit is not None
    return difference, len(unit.tree.records())


@pytest.mark.parametrize("runs_before", [False, True])
def test_weights_tied_after_wrapping(pool: Pool, runs_before: bool) -> None:
    for difference, count in pool.run(tied_after_wrapping, runs_before):
        assert difference < 1e-6
        assert count == 7
