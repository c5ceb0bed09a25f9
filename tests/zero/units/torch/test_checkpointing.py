"""Activation checkpoints of each kind, around units, inside of them and across them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, Mlp, layers, loss_of, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
KINDS = pytest.mark.parametrize("reentrant", [True, False])
RESHARD = pytest.mark.parametrize("reshard", [True, False, None])


class Recomputed(nn.Module):
    """Its blocks are run again in the backward pass, each or two at a time."""

    def __init__(self, reentrant: bool, at_once: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Mlp(12) for _ in range(4))
        self.head = nn.Linear(12, 5)
        self.reentrant, self.at_once = reentrant, at_once

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_() if self.reentrant else x
        for first in range(0, 4, self.at_once):
            run = partial(self.some, first)
            x = checkpoint(run, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out

    def some(self, first: int, x: Tensor) -> Tensor:
        for block in list(self.blocks)[first : first + self.at_once]:
            x = block(x)
        return x


def recomputed(reentrant: bool, at_once: int, reshard: bool | None) -> tuple[float, int]:
    """The difference, and how often ranks met in the last step."""

    def shard(net: Any) -> Any:
        for one in (*net.blocks, net.head):
            fully_shard(one, reshard_after_forward=reshard)
        return fully_shard(net, reshard_after_forward=reshard)

    beside = Beside.of(Recomputed(reentrant, at_once), shard)
    beside.run(range(3))
    net: Any = beside.net
    before = net._unit.tree.window.barriers
    beside.run([3])
    return beside.end(), net._unit.tree.window.barriers - before


@KINDS
@RESHARD
def test_train_parity_with_activation_checkpointing(
    pool: Pool, reentrant: bool, reshard: bool | None
) -> None:
    for at_once in (1, 2):
        for worst, met in pool.run(recomputed, reentrant, at_once, reshard):
            assert worst < CLOSE
            assert met == 2


def wrapped(reentrant: bool, order: str) -> float:
    """torch's wrapper around a unit, and a unit around the wrapper."""
    how = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrap = partial(checkpoint_wrapper, checkpoint_impl=how)

    def shard(net: Any) -> Any:
        for number, one in enumerate(layers(net)):
            if order == "unit inside":
                net[number] = wrap(fully_shard(one))
            else:
                net[number] = fully_shard(wrap(one))
        return fully_shard(net)

    beside = Beside.of(stack(), shard)
    return beside.run(range(3), with_gradient if reentrant else loss_of).end()


def with_gradient(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(net, x.clone().requires_grad_(), y)


@KINDS
@pytest.mark.parametrize("order", ["unit inside", "unit outside"])
def test_train_parity_with_checkpoint_wrapper(pool: Pool, reentrant: bool, order: str) -> None:
    assert max(pool.run(wrapped, reentrant, order, world=3)) < CLOSE


def whole_module(reentrant: bool) -> float:
    """The root itself is run again; then two forward passes come before a backward pass."""
    beside = Beside.of(stack())

    def once(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return nn.functional.mse_loss(again(net, x), y)

    def again(net: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(net, x, use_reentrant=reentrant)
        return out

    def twice(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        chosen, rejected = once(net, x, y), once(net, x * 0.5, y)
        return chosen - 0.3 * rejected

    return beside.run(range(2), once).run(range(2, 4), twice).end()


@KINDS
def test_train_parity_with_checkpointed_root(pool: Pool, reentrant: bool) -> None:
    assert max(pool.run(whole_module, reentrant)) < CLOSE


def accumulated(reentrant: bool) -> float:
    """Checkpoints under no_sync()."""
    beside = Beside.of(Recomputed(reentrant, 2), shards_of_blocks)
    net: Any = beside.net
    for step in range(2):
        beside.clear()
        with net.no_sync():
            beside.backward(2 * step, scale=0.5)
        beside.backward(2 * step + 1, scale=0.5)
        beside.compare()
        beside.step()
    return beside.end()


def shards_of_blocks(net: Any) -> Any:
    for one in net.blocks:
        fully_shard(one)
    return fully_shard(net)


@KINDS
def test_gradient_accumulation_with_activation_checkpointing(pool: Pool, reentrant: bool) -> None:
    assert max(pool.run(accumulated, reentrant)) < CLOSE
