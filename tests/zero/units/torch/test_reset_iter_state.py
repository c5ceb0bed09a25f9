"""reset_iter_state() after errors in passes, on all ranks and on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, Mlp, kinds, layers, loss_of, shard_all, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


class Fails(torch.autograd.Function):
    """Raises in the backward pass, if told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.module.fails == "backward":
            raise ValueError("fails in backward")
        return grad, None


class Failing(nn.Module):
    """Raises between its children where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(14)
        self.first, self.second = Mlp(12), Mlp(12)
        self.head = nn.Linear(12, 5)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.fails == "forward":
            raise ValueError("fails in forward")
        out: Tensor = self.head(self.second(Fails.apply(x, self)))
        return out


def failed(where: str, ranks: str) -> tuple[str, set[bool], float]:
    """The error, what is registered after the reset, and the next steps."""
    beside = Beside.of(Failing())
    net: Any = beside.net
    beside.run([0])
    beside.clear()
    net.fails = where if ranks == "all" or dist.get_rank() == 1 else ""
    found = ""
    try:
        loss_of(net, *beside.batches(2)[0]).backward()
    except (ValueError, RuntimeError) as error:
        found = str(error)
    net.fails = ""
    net.reset_iter_state()
    registered = set(kinds(net).values())
    return found, registered, beside.run(range(3, 6)).end()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("world", [2, 3])
def test_reset_iter_state_on_all_ranks(pool: Pool, where: str, world: int) -> None:
    for found, registered, worst in pool.run(failed, where, "all", world=world):
        assert found == f"fails in {where}"
        assert registered == {True}
        assert worst < CLOSE


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_reset_iter_state_drops_accumulated_gradients(pool: Pool, where: str) -> None:
    """As torch's does."""
    for found, missing, worst in pool.run(failed_within_accumulation, where):
        assert found == f"fails in {where}"
        assert missing == [True] * 10
        assert worst < CLOSE


def failed_within_accumulation(where: str) -> tuple[str, list[bool], float]:
    beside = Beside.of(Failing())
    net: Any = beside.net
    with net.no_sync():
        beside.backward(0)
    net.fails = where
    try:
        loss_of(net, *beside.batches(1)[0]).backward()
    except ValueError as error:
        found = str(error)
    net.fails = ""
    net.reset_iter_state()
    missing = [one.grad is None for one in net.parameters()]
    beside.alone.zero_grad()
    return found, missing, beside.run(range(2, 4)).end()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("world", [2, 3])
def test_reset_iter_state_after_one_rank(pool: Pool, where: str, world: int) -> None:
    """The other ranks meet its reset in their pass, which is an error there."""
    results = pool.run(failed, where, "one", world=world)
    for rank, (found, registered, worst) in enumerate(results):
        if rank == 1:
            assert found == f"fails in {where}"
        else:
            assert found
        assert registered == {True}
        assert worst < CLOSE


def of_a_child() -> tuple[str, str]:
    net = shard_all(stack())
    try:
        layers(net)[1].reset_iter_state()
    except RuntimeError as error:
        found = str(error)
    net.reset_iter_state()  # before any pass: nothing to do
    net(torch.ones(1, 12)).sum().backward()
    net.reset_iter_state()
    single: Any = fully_shard(nn.Linear(2, 2))
    single.reset_iter_state()
    return found, net.report()


def test_reset_iter_state_of_the_root_alone(pool: Pool) -> None:
    for found, report in pool.run(of_a_child):
        assert "expected the root" in found
        assert "FSDPMlp" in found
        assert "closed" in report
