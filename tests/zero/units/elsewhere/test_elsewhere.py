"""Modules that torch's FSDP2 runs, with our methods on them: beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dreamcomm.zero.units.elsewhere.module import ElsewhereModule, shard_elsewhere
from helpers.pool import Pool
from zero.units.elsewhere.elsewhere_net import (
    MESHES,
    WHY,
    Net,
    difference,
    everything,
    loss_of,
    mesh_of,
    part,
    sharded,
    whole,
)

pytestmark = pytest.mark.beyond_gloo("makes its Gloo groups beside dreamcomm's")


def trained(kind: str) -> tuple[float, float]:
    net, alone, worst = sharded(kind), Net(), 0.0
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, alone))
    for step in range(5):
        losses = [loss_of(net, step, part), loss_of(alone, step, everything)]
        for loss, optimizer in zip(losses, (ours, theirs), strict=True):
            optimizer.zero_grad()
            loss.backward()
        mean = losses[0].detach().clone()
        dist.all_reduce(mean)
        worst = max(worst, abs(float(mean) / dist.get_world_size() - float(losses[1])))
        worst = max(worst, difference(net, alone))
        ours.step()
        theirs.step()
    return worst, difference(net, alone, "data")


@MESHES
def test_training_is_that_of_one_process(pool: Pool, kind: str, world: int) -> None:
    for worst, weights in pool.run(trained, kind, world=world):
        assert worst < 1e-6
        assert weights < 1e-6


def accumulating(kind: str, how: str) -> list[float | bool]:
    """Three passes, of which the last reduces, or none does."""
    net, alone = sharded(kind), Net()
    quiet = []
    for step in range(3):
        if step < 2 or how != "backward":
            with net.no_sync():
                loss_of(net, step, part).backward()
            quiet.append(all(p.grad is None for p in net.parameters()))
        else:
            loss_of(net, step, part).backward()
        loss_of(alone, step, everything).backward()
    if how == "inside":
        with net.no_sync():
            net.reduce_gradients()
    elif how == "clip":
        net.clip_grad_norm_(1e9)
    else:
        net.reduce_gradients()
    once = difference(net, alone)
    net.reduce_gradients()
    return [once, difference(net, alone), all(quiet)]


@MESHES
@pytest.mark.parametrize("how", ["backward", "reduce", "inside", "clip"])
def test_what_accumulates_is_reduced_once(pool: Pool, kind: str, world: int, how: str) -> None:
    for once, twice, quiet in pool.run(accumulating, kind, how, world=world):
        assert quiet, "a pass under no_sync() has reduced"
        assert once < 1e-6
        assert twice == once


def flags_of(net: Any) -> list[tuple[bool, bool, bool]]:
    states = [one._get_fsdp_state() for one in net.modules() if isinstance(one, torchs.FSDPModule)]
    return [
        (group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward)
        for state in states
        for group in state._fsdp_param_groups
    ]


def restored() -> tuple[list[Any], list[Any], list[Any]]:
    net = sharded("gloo")
    net.middle.set_requires_gradient_sync(False)
    net.middle.set_reshard_after_backward(False)
    before = flags_of(net)
    inside: list[Any] = []

    def fail() -> None:
        with net.no_sync(), net.middle.no_sync():
            inside.extend(flags_of(net))
            raise KeyError("here")

    with pytest.raises(KeyError):
        fail()
    return before, inside, flags_of(net)


def test_no_sync_restores_what_was_set_before(pool: Pool) -> None:
    for before, inside, after in pool.run(restored):
        assert before == after
        assert [reduces for reduces, _, _ in before] == [True, False, True]
        assert not any(reduces or all_reduces for reduces, all_reduces, _ in inside)
        assert [kept for _, _, kept in inside] == [kept for _, _, kept in before]


def below(kind: str) -> tuple[list[bool], float]:
    net, alone = sharded(kind), Net()
    with net.no_sync():
        loss_of(net, 0, part).backward()
    loss_of(alone, 0, everything).backward()
    net.middle.reduce_gradients()
    names = [name for name, p in net.named_parameters() if p.grad is not None]
    only = [name.startswith("middle.") for name in names] + [len(names) == 2]
    net.reduce_gradients()
    return only, difference(net, alone)


@MESHES
def test_gradients_are_reduced_below_a_root(pool: Pool, kind: str, world: int) -> None:
    for only, worst in pool.run(below, kind, world=world):
        assert all(only)
        assert worst < 1e-6


def half_reduced(with_whole: bool) -> float:
    """One pass that is not all-reduced, and perhaps one that is not reduced at all."""
    net, alone = sharded("hsdp"), Net()
    net.set_requires_all_reduce(False)
    loss_of(net, 0, part).backward()
    loss_of(alone, 0, everything).backward()
    if with_whole:
        with net.no_sync():
            loss_of(net, 1, part).backward()
        loss_of(alone, 1, everything).backward()
    net.reduce_gradients()
    return difference(net, alone)


@pytest.mark.parametrize("with_whole", [False, True])
def test_what_is_not_all_reduced_yet_is_reduced(pool: Pool, with_whole: bool) -> None:
    assert max(pool.run(half_reduced, with_whole, world=4)) < 1e-6


def used_on_one_rank() -> float:
    net, alone = sharded("gloo", reshard_after_forward=False), Net()
    net.set_reduce_scatter_unused_params(True)
    with net.no_sync():
        loss_of(net, 0, part, skip=dist.get_rank() == 1).backward()
    net.reduce_gradients()
    losses = [loss_of(alone, 0, lambda one, k=k: one.chunk(2)[k], skip=k == 1) for k in range(2)]
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    return difference(net, alone)


def test_a_layer_that_has_gradients_on_one_rank_only(pool: Pool) -> None:
    assert max(pool.run(used_on_one_rank)) < 1e-6


def cast_gradients() -> float:
    """Accumulated in float32 where torch keeps them apart, as with bfloat16 parameters."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ways = []
    for accumulates in (True, False):
        net = sharded("gloo", mp_policy=policy)
        for step in range(2):
            net.set_requires_gradient_sync(not accumulates)
            loss_of(net, step, part).backward()
        net.set_requires_gradient_sync(True)
        net.reduce_gradients()
        ways.append([whole(p.grad) for p in net.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*ways, strict=True))


def test_gradients_that_are_cast(pool: Pool) -> None:
    assert max(pool.run(cast_gradients)) < 1e-6


def cleared(set_to_none: bool) -> tuple[float, float]:
    net, alone = sharded("gloo"), Net()
    loss_of(net, 7, part).backward()
    with net.no_sync():
        loss_of(net, 8, part).backward()
    net.zero_grad(set_to_none)
    left = sum(float(whole(p.grad).abs().sum()) for p in net.parameters() if p.grad is not None)
    with net.no_sync():
        loss_of(net, 0, part).backward()
    net.reduce_gradients()
    loss_of(alone, 0, everything).backward()
    return left, difference(net, alone)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_what_has_accumulated(pool: Pool, set_to_none: bool) -> None:
    for left, worst in pool.run(cleared, set_to_none):
        assert left == 0
        assert worst < 1e-6


def listed() -> tuple[bool, bool, float]:
    net, alone, mesh = Net(), Net(), mesh_of("gloo")
    units: list[nn.Module] = [net.middle, net.maybe]
    given = shard_elsewhere(units, WHY, mesh=mesh)
    root: Any = shard_elsewhere(net, WHY, mesh=mesh)
    with root.no_sync():
        loss_of(net, 0, part).backward()
    quiet = all(p.grad is None for p in net.parameters())
    root.reduce_gradients()
    loss_of(alone, 0, everything).backward()
    ours = given is units and all(isinstance(one, ElsewhereModule) for one in given)
    return ours, quiet, difference(net, alone)


def test_modules_that_are_one_unit(pool: Pool) -> None:
    for ours, quiet, worst in pool.run(listed):
        assert ours
        assert quiet
        assert worst < 1e-6
