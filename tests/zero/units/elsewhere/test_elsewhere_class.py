"""What torch and people see of a module that torch's FSDP2 runs."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fully_shard import get_cls_to_fsdp_cls

from dreamcomm.zero.units.elsewhere.module import ElsewhereModule, shard_elsewhere
from dreamcomm.zero.units.face import FSDPModule
from helpers.pool import Pool
from zero.units.elsewhere.elsewhere_net import (
    WHY,
    Net,
    difference,
    everything,
    loss_of,
    mesh_of,
    part,
    sharded,
)

pytestmark = pytest.mark.beyond_gloo("makes its Gloo groups beside dreamcomm's")


def reported() -> tuple[str, str]:
    net = sharded("gloo")
    before = net.report()
    with net.no_sync():
        loss_of(net, 0, part).backward()
    return before, net.report()


def test_the_report_tells_form_reason_and_bytes(pool: Pool) -> None:
    alone = list(Net().parameters())
    numel = sum(one.numel() for one in alone)
    for rank, (before, after) in enumerate(pool.run(reported)):
        rows = [one.chunk(2)[rank] for one in alone if len(one.chunk(2)) > rank]
        own = 4 * sum(one.numel() for one in rows)
        first, second, third = before.split("\n")
        assert first == f"torch's FSDP2 runs FSDPNet: {WHY}"
        assert second.startswith(
            f"8 parameters of {numel:,d} elements, {4 * numel:,d} bytes, in 3 units on DeviceMesh("
        )
        assert third == (
            f"rank {rank} has {own:,d} bytes of parameters, 0 of gradients, and 0 of gradients "
            "that are not reduced yet"
        )
        assert after.split("\n")[2] == third.replace("and 0 of", f"and {4 * numel:,d} of")


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def report(self) -> str:
        return "the module's"


def classes() -> dict[str, bool]:
    mesh = mesh_of("gloo")
    sequence: Any = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    first, second = (shard_elsewhere(Ours(), WHY, mesh=mesh) for _ in range(2))
    shard_elsewhere(sequence, WHY, mesh=mesh)
    kind: Any = type(first)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(first)
    again = kind()
    return {
        "torch's": isinstance(first, torchs.FSDPModule),
        "ours": isinstance(first, FSDPModule) and isinstance(first, ElsewhereModule),
        "the module's": isinstance(first, Ours),
        "a slice is plain": type(sequence[0:1]) is nn.Sequential,
        "a new one is plain": type(again) is Ours and again.report() == "the module's",
        "one class each": type(first) is type(second) and type(first) is not type(sequence),
        "its name": kind.__name__ == "FSDPOurs",
        "in dynamo's table": kind.__mro__[2] is Ours and Ours in get_cls_to_fsdp_cls(),
        "made by __new__": kind.__mro__[kind._orig_cls_mro_index] is Ours,
        "our methods first": WHY in first.report(),  # type: ignore[operator]
    }


def test_torch_takes_the_class_for_its_own(pool: Pool) -> None:
    for found in pool.run(classes):
        assert [name for name, holds in found.items() if not holds] == []


def compiled() -> float:
    net, alone = sharded("gloo"), Net()
    fast = torch.compile(net, backend="eager")
    loss_of(fast, 0, part).backward()
    loss_of(alone, 0, everything).backward()
    return difference(net, alone)


def test_a_compiled_module(pool: Pool) -> None:
    assert max(pool.run(compiled)) < 1e-6


def test_no_method_is_missing() -> None:
    def methods(of: type) -> dict[str, Any]:
        return {name: one for name, one in vars(of).items() if inspect.isfunction(one)}

    ours = methods(ElsewhereModule)
    for name, one in methods(FSDPModule).items():
        if not name.startswith("_"):
            given = inspect.signature(ours[name]).parameters
            assert list(given.values()) == list(inspect.signature(one).parameters.values())
