"""What is registered between passes: the DTensors or the whole parameters, as torch has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.sharding import my_batch
from zero.units.torch.beside import (
    CLOSE,
    Beside,
    kinds,
    layers,
    loss_of,
    shard_all,
    stack,
    theirs,
)

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
RESHARD = pytest.mark.parametrize("reshard", [True, False, None])
Kinds = list[tuple[str, dict[str, bool]]]


class WithOwn(nn.Module):
    """Its root has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = stack(2)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x) * self.scale
        return out


def watched(net: Any) -> Kinds:
    """What is registered at each moment of two steps and an evaluation."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found: Kinds = [("wrapped", kinds(net))]

    def note(when: str) -> None:
        found.append((when, kinds(net)))

    for step in range(2):
        loss = loss_of(net, *my_batch(step))
        note(f"forward {step}")
        loss.backward()
        note(f"backward {step}")
        optimizer.step()
        optimizer.zero_grad()
        note(f"step {step}")
    with torch.no_grad():
        net(my_batch(5)[0])
    note("evaluated")
    loss_of(net, *my_batch(6)).backward()
    note("backward again")
    return found


def as_theirs(shard: Callable[..., Any]) -> tuple[Kinds, Kinds]:
    return watched(shard(WithOwn(), shard_all)), watched(shard(WithOwn(), theirs))


def with_reshard(reshard: bool | None) -> tuple[Kinds, Kinds]:
    return as_theirs(lambda net, shard: shard(net, reshard_after_forward=reshard))


@RESHARD
def test_param_registration_after_forward(pool: Pool, reshard: bool | None) -> None:
    """After an evaluation that ends reading, DTensors: torch leaves a root's whole parameters."""
    for ours, torchs in pool.run(with_reshard, reshard):
        mine, his = dict(ours), dict(torchs)
        after = mine["forward 0"]
        assert after["scale"] is (reshard is True)
        assert after["blocks.0.into.weight"] is (reshard is not False)
        evaluated = mine.pop("evaluated"), his.pop("evaluated")
        assert set(evaluated[0].values()) == {reshard is not False}
        assert evaluated[1]["scale"] is (reshard is True)
        assert mine == his


def held_back(net: Any) -> Kinds:
    """A micro-batch whose gradients wait, and one that reduces."""
    found: Kinds = []
    for sync in (False, True):
        net.set_requires_gradient_sync(sync)
        net.set_is_last_backward(sync)
        loss = loss_of(net, *my_batch(int(sync)))
        found.append((f"forward {sync}", kinds(net)))
        loss.backward()
        found.append((f"backward {sync}", kinds(net)))
    return found


def after_backward(reshard: bool) -> tuple[Kinds, Kinds]:
    found = []
    for shard in (shard_all, theirs):
        net = shard(WithOwn(), reshard_after_forward=False)
        net.set_reshard_after_backward(reshard)
        found.append(held_back(net))
    return found[0], found[1]


@pytest.mark.parametrize("reshard", [True, False])
def test_param_registration_after_backward(pool: Pool, reshard: bool) -> None:
    """After the last one, DTensors, as owners write from then on: torch may leave whole ones."""
    for ours, torchs in pool.run(after_backward, reshard):
        assert ours[:3] == torchs[:3]
        assert set(dict(ours)["backward False"].values()) == {reshard}
        assert set(dict(ours)["backward True"].values()) == {True}
        assert set(dict(torchs)["backward True"].values()) == {reshard}


def at_runtime(recurse: bool) -> tuple[Kinds, Kinds]:
    def shard(net: Any, how: Callable[..., Any]) -> Any:
        how(net, reshard_after_forward=True)
        net.set_reshard_after_forward(False, recurse=recurse)
        return net

    return as_theirs(shard)


@pytest.mark.parametrize("recurse", [True, False])
def test_set_reshard_after_forward(pool: Pool, recurse: bool) -> None:
    for ours, torchs in pool.run(at_runtime, recurse):
        assert ours == torchs
        after = dict(ours)["forward 0"]
        assert after["scale"] is False
        assert after["blocks.0.into.weight"] is not recurse


def evaluated_by_turns() -> tuple[float, list[int]]:
    """Training with DTensors between the passes; in evaluation ranks go on reading, each as often
    as it likes. How often they have met in each evaluation."""
    beside = Beside.of(stack(), lambda net: shard_all(net, reshard_after_forward=True))
    net: Any = beside.net
    met = []
    for step in range(3):
        beside.run([step])
        net.set_reshard_after_forward(False)
        before = net._unit.tree.window.barriers
        with torch.no_grad():
            for number in range(1 + 2 * dist.get_rank()):
                x = beside.batches(number)[1][0]
                beside.note(float((net(x) - beside.alone(x)).abs().max()))
        net.set_reshard_after_forward(True)
        met.append(net._unit.tree.window.barriers - before)
    return beside.end(), met


def test_set_reshard_after_forward_by_turns(pool: Pool) -> None:
    for worst, met in pool.run(evaluated_by_turns, world=3):
        assert worst < CLOSE
        assert met == [1, 1, 1]


def refused_reshard() -> str:
    net = shard_all(stack())
    try:
        net.set_reshard_after_forward(2)
    except ValueError as error:
        return str(error)
    return ""


def test_set_reshard_after_forward_takes_a_bool(pool: Pool) -> None:
    assert "expected a bool, got int" in pool.run(refused_reshard)[0]


def by_hand() -> tuple[list[set[bool]], float]:
    """The root's whole parameters, kept after the forward pass, are resharded by hand."""
    beside = Beside.of(stack(), lambda net: shard_all(net, reshard_after_forward=False))
    net: Any = beside.net
    found = []

    def resharded(one: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(one, x, y)
        if one is net:
            found.append(set(kinds(net).values()))
            for module in (*layers(net), net):
                module.reshard()
            found.append(set(kinds(net).values()))
        return loss

    worst = beside.run(range(3), resharded).end()
    return found, worst


def test_manual_reshard_with_reshard_after_forward_false(pool: Pool) -> None:
    for found, worst in pool.run(by_hand):
        assert found == [{False}, {True}] * 3
        assert worst < CLOSE


def unsharded() -> tuple[list[set[bool]], list[bool], list[bool]]:
    """unshard() and reshard() are not recursive; the whole values are those of all rows."""
    net, alone = shard_all(stack()), stack()
    before = [one.full_tensor() for one in net.parameters()]
    found = [set(kinds(net).values())]
    layers(net)[0].unshard()
    found.append({kind for name, kind in kinds(net).items() if name.startswith("0.")})
    found.append({kind for name, kind in kinds(net).items() if not name.startswith("0.")})
    for one in layers(net):
        one.unshard()
    equal = [torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True)]
    equal += [torch.equal(a, b) for a, b in zip(net.parameters(), alone.parameters(), strict=True)]
    for one in (*layers(net), net):
        one.reshard()
    found.append(set(kinds(net).values()))
    rows = [
        torch.equal(one.to_local(), whole.chunk(dist.get_world_size())[dist.get_rank()])
        for one, whole in zip(net.parameters(), before, strict=True)
        if one.shape[0] % dist.get_world_size() == 0
    ]
    return found, equal, rows


def test_manual_unshard_and_reshard(pool: Pool) -> None:
    for found, equal, rows in pool.run(unsharded, world=3):
        assert found == [{True}, {False}, {True}, {True}]
        assert equal == [True] * 28
        assert rows == [True] * 12  # all but the head


def gradients() -> list[tuple[Any, ...]]:
    net = shard_all(stack())
    loss_of(net, *my_batch(0)).backward()
    found = []
    for one in net.parameters():
        grad = one.grad
        assert isinstance(one, DTensor)
        assert isinstance(grad, DTensor)
        found.append((type(grad), grad.placements == (Shard(0),), grad.shape == one.shape))
        found.append((grad.device_mesh == one.device_mesh, grad.to_local().shape))
        found.append((grad.dtype, one.to_local().shape))
    return found


def test_gradients_are_dtensors_as_the_parameters(pool: Pool) -> None:
    for found in pool.run(gradients, world=3):
        for (kind, sharded, same), (mesh, shape), (dtype, local) in zip(
            found[::3], found[1::3], found[2::3], strict=True
        ):
            assert (kind, sharded, same, mesh) == (DTensor, True, True, True)
            assert (dtype, shape) == (torch.float32, local)


def one_module() -> Kinds:
    """A single unit is its own root."""
    net: Any = fully_shard(nn.Linear(12, 5))
    return watched(net)


def test_param_registration_of_a_single_unit(pool: Pool) -> None:
    for found in pool.run(one_module):
        registered = {when: set(kind.values()) for when, kind in found}
        assert registered["wrapped"] == {True}
        assert registered["forward 0"] == {False}
        assert registered["backward 0"] == registered["step 1"] == registered["evaluated"] == {True}
