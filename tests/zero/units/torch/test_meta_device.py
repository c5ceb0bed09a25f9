"""Modules that are made on the meta device, and get their values after they are sharded."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from dreamcomm.zero import initialize
from helpers.pool import Pool
from zero.units.sharding import my_batch, whole
from zero.units.torch.beside import CLOSE, Beside, layers, loss_of, shard_all

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


class Buffered(nn.Module):
    """With a buffer that its own initialisation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(12, 12))
        self.register_buffer("table", torch.empty(12))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.2)
        self.table: Tensor = self.table
        self.table.copy_(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) + self.table


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 12), Buffered(), nn.LayerNorm(12), nn.Linear(12, 5))


def on_meta() -> Any:
    with torch.device("meta"):
        made = net()
    return shard_all(made)


def kinds_on_meta() -> tuple[set[str], list[tuple[int, ...]], str]:
    """The parameters of a module without values, and the error of its forward pass."""
    made = on_meta()
    devices = {one.device.type for one in made.parameters()}
    shapes = [tuple(one.to_local().shape) for one in made.parameters()]
    try:
        made(torch.ones(2, 12))
    except RuntimeError as error:
        found = str(error)
    return devices, shapes, found


def test_invalid_meta_device_init(pool: Pool) -> None:
    for devices, shapes, found in pool.run(kinds_on_meta):
        assert devices == {"meta"}
        assert shapes[:2] == [(6, 12), (6,)]
        assert "'0.weight'" in found
        assert "meta device" in found
        assert "to_empty" in found


def initialized(how: str) -> float:
    """The values of one process with that seed, and then its steps."""
    made = on_meta()
    made.to_empty(device="cpu")
    torch.manual_seed(100 + dist.get_rank())
    before = torch.get_rng_state()
    if how == "reset_parameters":
        initialize(made, seed=17)
    else:
        initialize(made, fill, seed=17)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(17)
    alone = net()
    torch.manual_seed(17)
    (reset if how == "reset_parameters" else fill)(alone)
    beside = Beside(made, alone)
    beside.compare()
    assert beside.worst == 0
    for ours, one in zip(made.buffers(), alone.buffers(), strict=True):
        assert torch.equal(ours, one)
    return beside.run(range(3)).end()


def reset(module: nn.Module) -> None:
    for one in module.modules():
        if hasattr(one, "reset_parameters"):
            one.reset_parameters()


@torch.no_grad()
def fill(module: nn.Module) -> None:
    for one in (*module.parameters(), *module.buffers()):
        one.normal_(std=0.3)


@pytest.mark.parametrize("how", ["reset_parameters", "a function"])
@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.long)])
def test_meta_device_1d_init(pool: Pool, how: str, world: int) -> None:
    assert max(pool.run(initialized, how, world=world)) < CLOSE


def by_recipe(seed: str) -> tuple[list[str], float]:
    """torch's recipe: reset_parameters() on DTensors. Equal seeds make equal rows: a warning."""
    made = on_meta()
    made.to_empty(device="cpu")
    torch.manual_seed(0 if seed == "equal" else dist.get_rank())
    for one in layers(made):
        one.reset_parameters()
    table = made[1].table
    dist.broadcast(table, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_of(made, *my_batch(0)).backward()
    made.zero_grad()
    alone = net()
    with torch.no_grad():
        for one, ours in zip(alone.parameters(), made.parameters(), strict=True):
            one.copy_(whole(ours))
    alone[1].table.copy_(table)  # type: ignore[operator,union-attr]
    texts = [str(one.message) for one in caught if "same rows" in str(one.message)]
    return texts, Beside(made, alone).run(range(2)).end()


@pytest.mark.parametrize("seed", ["equal", "by rank"])
def test_meta_device_reset_parameters(pool: Pool, seed: str) -> None:
    for texts, worst in pool.run(by_recipe, seed):
        assert worst < CLOSE
        assert len(texts) == (seed == "equal")
        assert all("dreamcomm.zero.initialize" in one for one in texts)


def broadcast() -> tuple[float, float]:
    """Rank 0 alone has the values."""
    torch.manual_seed(40)
    alone = net()
    made = on_meta()
    made.to_empty(device="cpu")
    state = dict(alone.state_dict()) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(made, state, options=options)
    beside = Beside(made, alone)
    beside.compare()
    return beside.worst, beside.run(range(3)).end()


@pytest.mark.parametrize("world", [2, 3])
def test_rank0_broadcast_meta_device_init(pool: Pool, world: int) -> None:
    for at_first, worst in pool.run(broadcast, world=world):
        assert at_first == 0
        assert worst < CLOSE


def assigned() -> tuple[float, float, list[str]]:
    """States of DTensors are assigned a piece at a time; until the last one a pass is refused."""
    torch.manual_seed(41)
    alone = net()
    made = on_meta()
    refused = []
    for name, value in alone.state_dict().items():
        if len(refused) < 2:
            try:
                made(torch.ones(1, 12))
            except RuntimeError as error:
                refused.append(str(error).split("parameter ")[1].split(" of")[0])
        given = value.clone()
        own = dict(made.named_parameters())
        if name in own:
            given = distribute_tensor(given, own[name].device_mesh, own[name].placements)
        made.load_state_dict({name: given}, assign=True, strict=False)
    assert all(isinstance(one, DTensor) for one in made.parameters())
    beside = Beside(made, alone)
    beside.compare()
    return beside.worst, beside.run(range(3)).end(), refused


def test_meta_device_assigned_state_dict(pool: Pool) -> None:
    for at_first, worst, refused in pool.run(assigned, world=3):
        assert at_first == 0
        assert worst < CLOSE
        assert refused == ["'0.weight'", "'0.bias'"]
