"""One rank writes the parameters of modules that torch's FSDP2 runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dreamcomm.zero.units.elsewhere.module import shard_elsewhere
from helpers.pool import Pool
from zero.units.elsewhere.elsewhere_net import (
    MESHES,
    WHY,
    Net,
    data,
    difference,
    everything,
    loss_of,
    mesh_of,
    part,
    sharded,
)

pytestmark = pytest.mark.beyond_gloo("makes its Gloo groups beside dreamcomm's")


def changed(net: nn.Module) -> None:
    for k, one in enumerate(net.parameters()):
        one.copy_(torch.arange(one.numel(), dtype=one.dtype).view(one.shape) / 1e4 + k / 50)


def rewritten(kind: str, how: str) -> tuple[bool, float, float, bool]:
    net, other = sharded(kind), Net()
    forms = [id(one) for one in net.parameters()]
    loss_of(net, 0, part)  # the root's whole parameters stay registered
    with torch.no_grad():
        changed(other)
    with net.rewrite() as writes:
        plain = all(type(one) is nn.Parameter for one in net.parameters())
        fits = plain is writes and (net.tied.weight is net.first[0].weight)
        if writes and how == "copies":
            changed(net)
        elif writes:
            net.load_state_dict(other.state_dict(), assign=how == "assigns")
    values = difference(net, other, "data")
    losses = loss_of(net, 1, everything), loss_of(other, 1, everything)
    losses[0].backward()
    losses[1].backward()
    return fits, values, difference(net, other), forms == [id(one) for one in net.parameters()]


@MESHES
@pytest.mark.parametrize("how", ["copies", "loads", "assigns"])
def test_one_rank_writes_for_all(pool: Pool, kind: str, world: int, how: str) -> None:
    for fits, values, gradients, kept in pool.run(rewritten, kind, how, world=world):
        assert fits
        assert values == 0
        assert gradients < 1e-6
        assert kept, "an optimizer's parameters are no longer the module's"


def rewritten_below() -> tuple[list[bool], float]:
    net, other = sharded("gloo"), Net()
    with net.middle.rewrite() as writes:
        plain = [type(one) is nn.Parameter for one in net.parameters()]
        if writes:
            net.middle.weight.fill_(3.0)
    with torch.no_grad():
        other.middle.weight.fill_(3.0)
    return plain, difference(net, other, "data")


def test_one_rank_writes_below_a_root(pool: Pool) -> None:
    (writer, worst), (reader, worst_there) = pool.run(rewritten_below)
    assert sum(writer) == 2
    assert sum(reader) == 0
    assert worst == worst_there == 0


def failing(kind: str, rank: int, how: str) -> tuple[str, float, float]:
    net: Any = sharded(kind)

    def body() -> None:
        with net.rewrite() as writes:
            if writes:
                changed(net)
            if dist.get_rank() == rank and how == "raises":
                raise KeyError("no such file")
            if dist.get_rank() == rank and how == "reshapes":
                net.middle.weight = nn.Parameter(torch.zeros(3))
            if how == "runs":
                net(data(0)[0])
            if how == "nests":
                with net.middle.rewrite():
                    pass

    with pytest.raises((RuntimeError, KeyError)) as raised:
        body()
    alone = Net()
    unchanged = difference(net, alone, "data")
    loss_of(net, 0, part).backward()
    loss_of(alone, 0, everything).backward()
    return f"{type(raised.value).__name__}: {raised.value}", unchanged, difference(net, alone)


@MESHES
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_rewrite_is_one_of_all_ranks(
    pool: Pool, kind: str, world: int, rank: int
) -> None:
    found = pool.run(failing, kind, rank, "raises", world=world)
    for other, (text, unchanged, gradients) in enumerate(found):
        expected = (
            "KeyError: 'no such file'"
            if other == rank
            else f"RewriteError: rank {other}: rewrite() of FSDPNet failed on rank {rank}: "
            "KeyError: 'no such file'. No parameter has changed on any rank"
        )
        assert text == expected
        assert unchanged == 0
        assert gradients < 1e-6


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("reshapes", "parameter 'middle.weight': expected a whole Parameter of shape (35, 35)"),
        ("runs", "run no passes"),
        ("nests", "within another rewrite()"),
    ],
)
def test_what_a_rewrite_refuses(pool: Pool, how: str, words: str) -> None:
    for rank, (text, unchanged, gradients) in enumerate(pool.run(failing, "gloo", 0, how)):
        assert text.startswith(f"RewriteError: rank {rank}: rewrite() of ")
        assert words in text
        assert unchanged == 0
        assert gradients < 1e-6


def on_meta() -> tuple[str, float]:
    with torch.device("meta"):
        net: Any = Net()
    shard_elsewhere(net, WHY, mesh=mesh_of("gloo"))
    with pytest.raises(RuntimeError) as raised, net.rewrite():
        pass
    net.to_empty(device="cpu")
    with net.rewrite() as writes:
        if writes:
            net.load_state_dict(Net().state_dict())
    return str(raised.value), difference(net, Net(), "data")


def test_a_model_without_memory_gets_values(pool: Pool) -> None:
    for rank, (text, values) in enumerate(pool.run(on_meta)):
        assert text.startswith(f"rank {rank}: rewrite() of FSDPNet failed on rank 0: ")
        assert "is on the meta device: call module.to_empty" in text
        assert values == 0


def first_ranks() -> str:
    """A module below whose mesh begins with each rank itself."""
    net, all_ranks = Net(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "own"))
    shard_elsewhere(net.middle, WHY, mesh=all_ranks["own"])
    shard_elsewhere(net, WHY, mesh=all_ranks["all"])
    root: Any = net
    with pytest.raises(RuntimeError) as raised, root.rewrite():
        pass
    return str(raised.value)


def test_meshes_that_begin_with_different_ranks(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(first_ranks)):
        assert text.startswith(f"rank {rank}: rewrite() of FSDPNet failed on rank 1: ")
        assert "expected one first rank for all meshes of its parameters" in text


def interrupted(error: type[BaseException]) -> tuple[bool, float]:
    """On one rank, whose shards are the whole parameters."""
    net = sharded("gloo")

    def body() -> None:
        with net.rewrite():
            changed(net)
            raise error

    with pytest.raises(error):
        body()
    return all(isinstance(one, DTensor) for one in net.parameters()), difference(net, Net(), "data")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_one_rank_alone_is_interrupted(pool: Pool, error: type[BaseException]) -> None:
    assert pool.run(interrupted, error, world=1) == [(True, 0.0)]
