"""What fully sharded training takes of memory, as planned and as measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dreamcomm import zero
from dreamcomm.zero import (
    MixedPrecisionPolicy,
    ZeroOptimizer,
    fully_shard,
    memory_report,
    process_memory,
)
from helpers.pool import Fresh, Pool
from zero.checkpoints import train
from zero.units.sharding import made, my_batch, shard

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

AdamW = torch.optim.AdamW


def held(name: str) -> None:
    """Bytes by kind, before a step, after it, and while gradients are held back."""
    module = made(name)
    world, rank = dist.get_world_size(), dist.get_rank()
    planned = zero.estimate(module, world, 3, rank=rank)
    shard(module)
    optimizer = ZeroOptimizer(module.parameters(), AdamW)
    first = memory_report(optimizer)
    assert (first.gradients, first.optimizer_state, first.process) == (0, 0, None)
    train(module, optimizer, range(2))
    report = memory_report(optimizer)
    assert report == optimizer.report()
    parts = ("parameters", "gradients", "optimizer_state", "master_parameters", "total")
    for part in parts:
        assert getattr(report, part) == getattr(report.planned, part), part
        assert getattr(planned, part) == getattr(report.planned, part), part
    assert (report.planned.stage, report.planned.world_size) == (3, world)
    optimizer.zero_grad()
    x, y = my_batch(0)
    with module.no_sync():  # type: ignore[operator]
        nn.functional.mse_loss(module(x), y).backward()
    whole = sum(one.numel() * one.element_size() for one in module.parameters())
    assert memory_report(optimizer).gradients - report.gradients == whole
    module.reduce_gradients()  # type: ignore[operator]
    assert memory_report(optimizer).gradients == report.gradients
    assert "planned" in str(report)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["mlp", "gpt", "tied"])
def test_the_plan_is_what_tensors_take(pool: Pool, name: str, world: int) -> None:
    pool.run(held, name, world=world)


def held_in(form: dict[str, Any]) -> None:
    """A form's report: the plan is what there is."""
    if "mesh" in form:
        shape = (2, dist.get_world_size() // 2)
        form = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))}
    module = shard(made("gpt"), **form)
    optimizer = ZeroOptimizer(module.parameters(), AdamW)
    train(module, optimizer, range(2))
    report = memory_report(optimizer)
    parts = ["parameters", "optimizer_state", "master_parameters"]
    for part in parts if "mesh" in form else [*parts, "gradients"]:
        assert getattr(report, part) == getattr(report.planned, part), part
    pool = getattr(module._unit.tree.form, "pool", None)
    assert pool is None or report.planned.transient > pool.most_bytes > 0


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("form", "world", "hosts"),
    [
        ({"mp_policy": BF16}, 2, None),
        ({"mp_policy": BF16, "gather": True}, 3, None),
        ({"mesh": None}, 4, None),
        ({}, 4, "a,a,b,b"),
    ],
)
def test_each_form_is_planned(
    pool: Pool, form: dict[str, Any], world: int, hosts: str | None
) -> None:
    env = None if hosts is None else {"DREAMCOMM_HOSTS": hosts}
    pool.run(held_in, form, world=world, env=env)


WIDTH, LAYERS = 1500, 4


def trained(steps: int, gather: bool) -> tuple[int, int]:
    """The largest growth of the process, and the planned bytes."""
    torch.set_num_threads(1)
    warm = nn.Linear(64, 64)
    stepper = torch.optim.AdamW(warm.parameters())
    warm(torch.ones(2, 64)).sum().backward()
    stepper.step()
    dist.barrier()
    before = process_memory()
    module: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    world, rank = dist.get_world_size(), dist.get_rank()
    planned = zero.estimate(module, world, 3, rank=rank, gathered=gather).peak
    for layer in module:
        fully_shard(layer, gather=gather)
    fully_shard(module, gather=gather)
    optimizer = ZeroOptimizer(module.parameters(), AdamW)
    largest = 0
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.ones(2, WIDTH)).sum().backward()
        dist.barrier()
        largest = max(largest, process_memory() - before)
        dist.barrier()
        optimizer.step()
        dist.barrier()
        largest = max(largest, process_memory() - before)
        dist.barrier()
    report = optimizer.report(since=before)
    assert report.process is not None
    assert "process, at its peak" in str(report)
    return largest, planned


@pytest.mark.parametrize(("world", "gather"), [(2, False), (4, False), (2, True)])
def test_the_plan_is_what_processes_take(fresh: Fresh, world: int, gather: bool) -> None:
    """16 bytes a parameter on the host, and what is under way; some MB are torch's."""
    found = fresh.run(trained, 4, gather, world=world, timeout=120)
    measured, planned = (sum(column) for column in zip(*found, strict=True))
    assert measured == pytest.approx(planned, rel=0.05)
    assert measured < planned + world * 8e6
