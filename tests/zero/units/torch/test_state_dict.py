"""States by torch's recipes for FSDP2: saved, kept, assigned, of a part, and of rank 0 alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.sharding import my_batch, whole
from zero.units.torch.beside import (
    CLOSE,
    Beside,
    Mlp,
    furthest,
    loss_of,
    shard_all,
    stack,
)

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def blocks(width: int) -> nn.Sequential:
    torch.manual_seed(42)
    inner = nn.Sequential(Mlp(width), nn.Linear(width, width))
    return nn.Sequential(Mlp(width), inner, Mlp(width))


def saved_and_loaded(width: int, reshard: bool) -> list[bool]:
    """States alias the rows; new ones are written into them, in every state of a step."""
    net = shard_all(blocks(width), reshard_after_forward=reshard)
    world, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for value, runs in ((1.0, False), (42.0, True), (7.0, True)):
        if runs:
            net(torch.ones(2, width))  # may leave whole parameters registered
        state = net.state_dict()
        own = dict(net.named_parameters())
        found.append(list(state) == list(own) == list(blocks(width).state_dict()))
        for name, one in own.items():
            found.append(isinstance(one, DTensor) and isinstance(state[name], DTensor))
            found.append(state[name].to_local().data_ptr() == one.to_local().data_ptr())
        fresh = {name: one.detach().clone().fill_(value) for name, one in state.items()}
        pointers = [one.to_local().data_ptr() for one in own.values()]
        net.load_state_dict(fresh)
        after = dict(net.named_parameters())
        found.append([one.to_local().data_ptr() for one in after.values()] == pointers)
        found.append(all(bool((one.to_local() == value).all()) for one in after.values()))
        found.append(all(bool((whole(one) == value).all()) for one in after.values()))
    return [*found, rank < world]


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("reshard", [True, False])
def test_dp_state_dict_save_load(pool: Pool, width: int, reshard: bool) -> None:
    for found in pool.run(saved_and_loaded, width, reshard, world=3):
        assert found == [True] * len(found)
        assert len(found) == 3 * (4 + 2 * 14) + 1


def cached(width: int, converts: bool) -> tuple[list[bool], list[bool], float]:
    """A state taken before steps shows their values, unless the module has moved since."""
    torch.manual_seed(42)
    net = nn.Linear(width, width, bias=False)
    alone = copy.deepcopy(net)
    fully_shard(net, reshard_after_forward=True)
    state = net.state_dict()
    first = state["weight"].to_local().clone()
    if converts:
        net.double().float()
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (net, alone))
    shows, keeps = [], []
    for step in range(4):
        x = torch.rand(6, width, generator=torch.Generator().manual_seed(step))
        for one, optimizer, data in ((net, ours, my_rows(x)), (alone, theirs, x)):
            optimizer.zero_grad()
            one(data).square().mean().backward()
            optimizer.step()
        weight: Any = net.weight
        shows.append(torch.equal(state["weight"].to_local(), weight.to_local()))
        keeps.append(torch.equal(state["weight"].to_local(), first))
    return shows, keeps, furthest(net.parameters(), alone.parameters())


def my_rows(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


@pytest.mark.parametrize("width", [4, 5])
@pytest.mark.parametrize("converts", [False, True])
def test_cached_state_dict(pool: Pool, width: int, converts: bool) -> None:
    for shows, keeps, worst in pool.run(cached, width, converts):
        assert shows == [not converts] * 4
        assert keeps == [converts] * 4
        assert worst < 1e-5


def of_another() -> tuple[nn.Module, dict[str, DTensor]]:
    """Other values, in one process and as DTensors."""
    torch.manual_seed(77)
    net = nn.Sequential(*(Mlp(12) for _ in range(3)), nn.Linear(12, 5))
    alone = copy.deepcopy(net)
    state = {name: one.detach().clone() for name, one in shard_all(net).state_dict().items()}
    return alone, state


def assigned(after_steps: int) -> tuple[float, float, list[str]]:
    """Values and steps after load_state_dict(assign=True), with the names in the error of an
    optimizer that was made before."""
    net = shard_all(stack())
    old = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(after_steps):
        loss_of(net, *my_batch(step)).backward()
        old.step()
        old.zero_grad()
    alone, state = of_another()
    net.load_state_dict(state, assign=True)
    beside = Beside(net, alone)
    beside.compare()
    at_first = beside.worst
    beside.run(range(3))
    kinds = sorted({type(one).__name__ for one in net.parameters()})
    return at_first, beside.end(), kinds


@pytest.mark.parametrize("after_steps", [0, 2])
def test_assigned_state_dict(pool: Pool, after_steps: int) -> None:
    for at_first, worst, kinds in pool.run(assigned, after_steps, world=3):
        assert at_first == 0
        assert worst < CLOSE
        assert kinds == ["DTensor"]


def of_a_part() -> tuple[list[str], float]:
    """A child's state is saved and loaded alone, by the child and with a prefix by the root."""
    net, alone = shard_all(stack()), stack()
    other, state = of_another()
    child = {name[2:]: one for name, one in state.items() if name.startswith("1.")}
    net[1].load_state_dict(child)
    missing = net.load_state_dict(
        {name: one for name, one in state.items() if name.startswith("3.")}, strict=False
    )
    own = dict(other.named_parameters())
    with torch.no_grad():
        for name, one in alone.named_parameters():
            if name[0] in "13":
                one.copy_(own[name])
    names = list(net[1].state_dict())
    beside = Beside(net, alone)
    beside.compare()
    assert len(missing.missing_keys) == 12
    return names, beside.run(range(2)).end()


def test_state_dict_of_a_submodule(pool: Pool) -> None:
    for names, worst in pool.run(of_a_part):
        assert names == ["into.weight", "into.bias", "out.weight", "out.bias"]
        assert worst < CLOSE


def full_on_rank0(offload: bool) -> tuple[list[str], list[bool]]:
    net, alone = shard_all(stack()), stack().state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    state = get_model_state_dict(net, options=options)
    equal = [
        type(state[name]) is Tensor and torch.equal(state[name], alone[name]) for name in state
    ]
    return list(state), equal


@pytest.mark.parametrize("offload", [True, False])
def test_rank0_offload_full_state_dict(pool: Pool, offload: bool) -> None:
    found = pool.run(full_on_rank0, offload)
    names, equal = found[0]
    assert (len(names), equal) == (14, [True] * 14)
    assert found[1][0] == ([] if offload else names)
    assert all(found[1][1])
