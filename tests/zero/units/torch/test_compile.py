"""torch.compile of units and of the root, before and after they are sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, layers, loss_of, shard_all, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
compiled = partial(torch.compile, backend="aot_eager", dynamic=False)


def blocks_then_shard(net: Any) -> Any:
    """Compiled modules are what is sharded."""
    for number, one in enumerate(layers(net)):
        net[number] = compiled(one)
        fully_shard(net[number])
    return fully_shard(net)


def in_place_then_shard(net: Any) -> Any:
    for one in layers(net):
        one.compile(backend="aot_eager", dynamic=False)
        fully_shard(one)
    return fully_shard(net)


def shard_then_blocks(net: Any) -> Any:
    for number, one in enumerate(layers(net)):
        net[number] = compiled(fully_shard(one))
    return fully_shard(net)


def shard_then_in_place(net: Any) -> Any:
    shard_all(net)
    for one in layers(net):
        one.compile(backend="aot_eager", dynamic=False)
    return net


def shard_then_root(net: Any) -> Any:
    shard_all(net)
    net.compile(backend="aot_eager", dynamic=False)
    return net


ORDERS = {
    one.__name__: one
    for one in (
        blocks_then_shard,
        in_place_then_shard,
        shard_then_blocks,
        shard_then_in_place,
        shard_then_root,
    )
}


def trained(order: str) -> tuple[float, int]:
    """The difference, and how many graphs were compiled in the last steps: none."""
    torch._dynamo.reset()
    beside = Beside.of(stack(2), ORDERS[order])
    beside.run(range(2))
    before = frames()
    return beside.run(range(2, 5)).end(), frames() - before


def frames() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("order", ORDERS)
def test_compiled_units(pool: Pool, order: str) -> None:
    for worst, recompiled in pool.run(trained, order, timeout=120):
        assert worst < CLOSE
        assert recompiled == 0


def was_compiled() -> list[int]:
    """How many graphs two blocks have in a step: in one process, and as units."""
    found = []
    for shard in (None, shard_all):
        torch._dynamo.reset()
        net: Any = stack(2)
        beside = Beside(net if shard is None else shard(net), stack(2))
        for one in layers(net)[:2]:
            one.compile(backend="aot_eager", dynamic=False)
        before = frames()
        loss_of(net, *beside.batches(0)[0]).backward()
        found.append(frames() - before)
    return found


def test_compiled_units_are_whole_graphs(pool: Pool) -> None:
    """One a block, as the first one's input needs no gradient, and the second one's does."""
    assert pool.run(was_compiled, timeout=120) == [[2, 2]] * 2


def evaluated() -> tuple[float, float]:
    """Without gradients, then with them again; and accumulated under no_sync()."""
    torch._dynamo.reset()
    beside = Beside.of(stack(2), shard_then_in_place)
    beside.run([0])
    x = torch.ones(3, 12)
    with torch.no_grad():
        difference = float((beside.net(x) - beside.alone(x)).abs().max())
    net: Any = beside.net
    beside.clear()
    with net.no_sync():
        beside.backward(1)
    beside.backward(2)
    beside.compare()
    beside.step()
    return difference, beside.run([3]).end()


def test_compiled_units_without_gradients(pool: Pool) -> None:
    for difference, worst in pool.run(evaluated, timeout=120):
        assert difference < CLOSE
        assert worst < CLOSE


def whole_step() -> float:
    """A compiled function calls a sharded module, whose hooks break its graph."""
    torch._dynamo.reset()
    beside = Beside.of(stack(2))
    run = compiled(loss_of)

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = run(net, x, y) if net is beside.net else loss_of(net, x, y)
        return found

    return beside.run(range(3), loss).end()


def test_compiled_step(pool: Pool) -> None:
    assert max(pool.run(whole_step, timeout=120)) < CLOSE
