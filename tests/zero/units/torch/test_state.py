"""The class that a module gets, and the state that torch finds in it."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import nn

from dreamcomm.zero import FSDPModule, fully_shard
from helpers.pool import Pool
from zero.units.sharding import my_batch
from zero.units.torch.beside import CLOSE, Beside, layers, loss_of, shard_all, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def states() -> list[bool]:
    net = shard_all(stack())
    of: Any = torchs.fully_shard
    found = [of.state(one) for one in (net, *layers(net))]
    return [
        len({id(one) for one in found}) == 5,
        all(one is not None for one in found),
        of.state(net) is found[0],
        of.state(net[0].into) is None,
    ]


def test_fully_shard_state(pool: Pool) -> None:
    assert pool.run(states) == [[True] * 4] * 2


def classes() -> list[Any]:
    net, other = shard_all(stack()), fully_shard(nn.Linear(2, 2))
    return [
        [type(one).__name__ for one in (net, net[0], net[3], net[0].into)],
        [isinstance(one, FSDPModule) for one in net.modules()],
        [isinstance(one, torchs.FSDPModule) for one in (net, net[0])],
        isinstance(net, nn.Sequential) and isinstance(net[3], nn.Linear),
        type(net[3]) is type(other),
        type(net[3]).__module__ == nn.Linear.__module__,
        (type(net[:2]).__name__, len(net[:2]), net[:2][0] is net[0]),
        type(type(net[3])(3, 3)).__name__,
    ]


def test_fully_shard_cls(pool: Pool) -> None:
    for names, ours, torchs_, kept, same, module, sliced, made in pool.run(classes):
        assert names == ["FSDPSequential", "FSDPMlp", "FSDPLinear", "Linear"]
        assert ours == [True] + [True, False, False] * 3 + [True]
        assert torchs_ == [True, True]
        assert kept
        assert same
        assert module
        assert sliced == ("Sequential", 2, True)
        assert made == "Linear"


class Slotted(nn.Module):
    """Subclasses call super() and have methods named as ours."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 5)
        self.asked = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out

    def extra_repr(self) -> str:
        return f"asked={self.asked}"

    def __getattr__(self, name: str) -> Any:
        if name == "computed":
            return 42
        return super().__getattr__(name)


class Below(Slotted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def own_class() -> tuple[float, Any, str]:
    beside = Beside.of(Below(), fully_shard)
    worst = beside.run(range(2)).end()
    return worst, beside.net.computed, repr(beside.net)


def test_fully_shard_own_classes(pool: Pool) -> None:
    for worst, computed, text in pool.run(own_class):
        assert worst < CLOSE
        assert computed == 42
        assert text.startswith("FSDPBelow(\n  asked=0\n  (inner): Linear(")


def reapplied() -> list[str]:
    net = shard_all(stack())
    found = []
    for again in (fully_shard, torchs.fully_shard):
        for one in (net, net[0]):
            try:
                again(one)
            except Exception as error:
                found.append(type(error).__name__)
    loss_of(net, *my_batch(0)).backward()
    return found


def test_fully_shard_reapply(pool: Pool) -> None:
    for found in pool.run(reapplied):
        assert found[:2] == ["ValueError"] * 2
        assert len(found) == 4


def copied() -> tuple[list[str], float]:
    """A copy would share rows; what holds such a module is not copied either."""
    beside = Beside.of(stack())
    found = []
    for one in (beside.net, [beside.net], nn.Sequential(beside.net)):
        try:
            copy.deepcopy(one)
        except RuntimeError as error:
            found.append(str(error))
    return found, beside.run(range(2)).end()


def test_fully_shard_deepcopy(pool: Pool) -> None:
    for found, worst in pool.run(copied):
        assert len(found) == 3
        assert all("cannot be copied" in one and "detach().clone()" in one for one in found)
        assert worst < CLOSE


def regions() -> int:
    return Path("/proc/self/maps").read_text().count("dreamcomm-region")


def deleted() -> tuple[int, int, int, bool]:
    """Mappings of parameters before, with a module, and after it has gone, without a collection."""
    gc.collect()
    before = regions()
    gc.disable()
    try:
        net = shard_all(stack())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(net, *my_batch(step)).backward()
            optimizer.step()
        during, gone = regions(), weakref.ref(net[0])
        del net, optimizer
        gc.collect()
        return before, during, regions(), gone() is None
    finally:
        gc.enable()


def test_fully_shard_del_memory(pool: Pool) -> None:
    for before, during, after, is_gone in pool.run(deleted):
        assert during > before
        assert after == before
        assert is_gone


def kept_memory() -> tuple[list[int], list[int]]:
    """Bytes of gradients after each of two steps, and of the rows of this rank."""
    net = shard_all(stack(3, 24))
    found = []
    for step in range(2):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        held = {
            id(one.untyped_storage()): one.untyped_storage().nbytes()
            for p in net.parameters()
            if isinstance(one := p.grad.to_local(), torch.Tensor)
        }
        wholes = [r.whole.grad for r in net._unit.tree.records()]
        assert wholes == [None] * 14
        found.append(sum(held.values()))
        net.zero_grad()
    return found, [sum(p.to_local().nbytes for p in net.parameters())]


def test_fully_shard_training_memory(pool: Pool) -> None:
    """After a pass a rank holds the gradients of its rows alone."""
    for found, (rows,) in pool.run(kept_memory, world=3):
        assert found[0] == found[1]
        assert rows <= found[0] <= 1.3 * rows
