"""reduce="tokens" calls nothing more where ranks share memory, and one small call elsewhere."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import dreamcomm
from ddp.models import make
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from training.token_means import micro_batch, summed_loss
from zero.units.sharding import shard

pytestmark = pytest.mark.beyond_gloo("counts what only dreamcomm counts")

NAMES = ["ddp", "replicate", "zero1", "zero2", "sharded", "gathered"]
TWO_HOSTS = {"DREAMCOMM_HOSTS": "a,a,b,b"}


def made(name: str, reduce: str, group: Any) -> tuple[nn.Module, Any, Any]:
    """A module, its optimizer, and what counts and reduces."""
    module = make("mlp", torch.float64)
    if name == "ddp":
        model = dreamcomm.DistributedDataParallel(module, process_group=group, reduce=reduce)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), model
    if name == "replicate":
        dreamcomm.replicate(module, group=group, reduce=reduce)
    elif name.startswith("zero"):
        zero = ZeroOptimizer(
            module.parameters(), torch.optim.SGD, group, stage=int(name[-1]), reduce=reduce, lr=0.1
        )
        return module, zero, zero
    else:
        options: dict[str, Any] = {"gather": True} if name == "gathered" else {}
        if name == "hybrid":
            names = ("replicas", "shards")
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        module = shard(module, reduce="mean" if reduce == "sum" else reduce, **options)
    return module, torch.optim.SGD(module.parameters(), lr=0.1), module


def calls() -> Counter[str]:
    """Calls of all groups so far."""
    found: Counter[str] = Counter()
    for group in distributed_c10d._world.pg_map:
        if dist.get_backend(group) == "gloo":
            found["gloo"] += group._get_sequence_number_for_group()
            continue
        for name, one in dreamcomm.stats(group).items():
            found[name] += one["calls"]
    return found


def of_a_step(name: str, reduce: str, group: Any) -> Counter[str]:
    """The calls of a later step: two passes, of which the second reduces."""
    module, optimizer, counts = made(name, reduce, group)
    for step in range(3):
        before = calls()
        optimizer.zero_grad()
        for micro in range(2):
            x, y, weights = micro_batch("uneven", dist.get_rank(), step, micro)
            loss = summed_loss(module, x, y, weights, torch.float64)
            if reduce == "tokens":
                counts.count(len(weights))
            if micro == 1:
                loss.backward()
                continue
            with counts.no_sync():
                loss.backward()
        optimizer.step()
    return calls() - before


def more(name: str, over_gloo: bool = False) -> dict[str, int]:
    """Calls of a step by tokens that one by sums has not."""
    group = dist.new_group(backend="gloo") if over_gloo else None
    ours, others = (of_a_step(name, reduce, group) for reduce in ("tokens", "sum"))
    assert not others - ours
    assert sum(others.values()) > 0
    return dict(ours - others)


@pytest.mark.parametrize("name", NAMES)
def test_counts_ride_where_memory_is_shared(pool: Pool, name: str) -> None:
    assert pool.run(more, name, world=3) == [{}] * 3


@pytest.mark.parametrize("name", [*NAMES, "hybrid"])
def test_one_call_between_hosts(pool: Pool, name: str) -> None:
    assert pool.run(more, name, world=4, env=TWO_HOSTS) == [{"all_gather": 1}] * 4


def test_one_call_over_two_dimensions(pool: Pool) -> None:
    assert pool.run(more, "hybrid", world=4) == [{"all_gather": 1}] * 4


@pytest.mark.parametrize("name", ["ddp", "replicate", "zero1", "zero2"])
def test_one_call_over_gloo(pool: Pool, name: str) -> None:
    assert pool.run(more, name, over_gloo=True) == [{"gloo": 1}] * 2
