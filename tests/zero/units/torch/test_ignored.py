"""Parameters that fully_shard is told to leave alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, Mlp, kinds, layers, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def ignoring() -> tuple[float, dict[str, bool], bool]:
    """A child of the root, and one weight in a unit, stay plain; the script reduces them."""
    net = stack()
    alone = copy.deepcopy(net)
    ignored = [*net[1].parameters(), net[2].into.weight]
    for number in (0, 2):
        fully_shard(net[number], ignored_params=set(ignored))
    fully_shard(net, ignored_params=set(ignored))
    beside = Beside(net, alone)
    for step in range(3):
        beside.clear()
        beside.backward(step)
        for one in ignored:
            assert one.grad is not None
            dist.all_reduce(one.grad)
            one.grad /= dist.get_world_size()
        beside.compare()
        beside.step()
    same = [one for one in net.parameters() if type(one) is nn.Parameter]
    return beside.end(), kinds(net), list(map(id, same)) == list(map(id, ignored))


def test_ignored_params(pool: Pool) -> None:
    for worst, sharded, same in pool.run(ignoring, world=3):
        assert worst < CLOSE
        plain = [name for name, is_sharded in sharded.items() if not is_sharded]
        assert [name for name in plain if name.startswith("1.")] == plain[:4]
        assert plain[4:] == ["2.into.weight"]
        assert same


def between_replicas() -> tuple[float, list[bool]]:
    """Sharded layers between replicated ones, each with its own way to reduce gradients."""
    torch.manual_seed(2)
    net = nn.Sequential(Mlp(12), Mlp(12), nn.Linear(12, 5))
    alone = copy.deepcopy(net)
    parts = layers(net)
    made = [DistributedDataParallel(parts[0]), fully_shard(parts[1])]
    made.append(DistributedDataParallel(parts[2]))
    beside = Beside(nn.Sequential(*made), alone)
    worst = beside.run(range(4)).end()
    return worst, list(kinds(beside.net).values())


def test_ddp_A_fsdp_B_ddp_C(pool: Pool) -> None:
    for worst, sharded in pool.run(between_replicas):
        assert worst < CLOSE
        assert sharded == [False] * 4 + [True] * 4 + [False] * 2


def ignored_in_a_child() -> tuple[list[str], Any]:
    """What a child ignores is not taken in by its root either."""
    net = stack(1)
    fully_shard(net[0], ignored_params={net[0].into.bias})
    fully_shard(net)
    net(torch.ones(2, 12)).sum().backward()
    sharded = [name for name, is_sharded in kinds(net).items() if is_sharded]
    bias: Any = net[0].into.bias
    return sharded, type(bias).__name__


def test_ignored_in_a_child(pool: Pool) -> None:
    for sharded, kind in pool.run(ignored_in_a_child):
        assert "0.into.bias" not in sharded
        assert (len(sharded), kind) == (5, "Parameter")
