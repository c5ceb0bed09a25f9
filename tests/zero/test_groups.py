"""ZeroOptimizer on other groups: of several hosts, of Gloo, without a heap, of some ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dreamcomm
from ddp.models import batch, make, rows_of
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def trained(group: Any, name: str, stage: int | None, clip: float | None, steps: int = 4) -> Any:
    """Norms and weights of ZeRO, or without a stage of DDP with a plain optimizer."""
    module: nn.Module = make(name)
    if stage is None:
        module = dreamcomm.DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.2)
        stepper: Any = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)
    else:
        stepper = ZeroOptimizer(module.parameters(), torch.optim.AdamW, group, stage=stage, lr=1e-3)
    clips = module.clip_grad_norm_ if stage is None else stepper.clip_grad_norm_
    norms = []
    for step in range(steps):
        x, y = (
            rows_of(one, dist.get_rank(group), dist.get_world_size(group)) for one in batch(step)
        )
        stepper.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        if clip is not None:
            norms.append(float(clips(clip)))
        stepper.step()
    return norms, [p.detach().clone() for p in module.parameters()]


def both(kind: str, name: str, stage: int) -> Any:
    group: Any = dist.group.WORLD
    if kind == "gloo":
        group = dist.new_group(backend="gloo")
    elif kind == "some ranks":
        group = dist.new_group([1, 2])
        if dist.get_rank() not in (1, 2):
            return None
    return trained(group, name, None, 0.05), trained(group, name, stage, 0.05)


def check(found: list[Any], *, bits: bool) -> None:
    for one in found:
        if one is None:
            continue
        (norms, weights), (zero_norms, zero_weights) = one
        if bits:
            assert zero_norms == norms
            assert all(map(torch.equal, weights, zero_weights))
        assert zero_norms == pytest.approx(norms, rel=1e-5)
        for expected, got in zip(weights, zero_weights, strict=True):
            assert torch.allclose(expected, got, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["gpt", "odd", "cnn"])
def test_over_gloo(pool: Pool, name: str, stage: int) -> None:
    """Gloo adds in another order when it scatters."""
    check(pool.run(both, "gloo", name, stage, world=3), bits=False)


@pytest.mark.parametrize("stage", [1, 2])
def test_on_several_hosts(pool: Pool, stage: int) -> None:
    found = pool.run(both, "world", "odd", stage, world=3, env={"DREAMCOMM_HOSTS": "a,b,a"})
    check(found, bits=False)


@pytest.mark.parametrize("stage", [1, 2])
def test_without_a_heap(pool: Pool, stage: int) -> None:
    """Shards go through collectives, with the same bits."""
    check(pool.run(both, "world", "gpt", stage, world=3, options={"heap_bytes": 0}), bits=True)


@pytest.mark.parametrize("stage", [1, 2])
def test_some_ranks(pool: Pool, stage: int) -> None:
    check(pool.run(both, "some ranks", "gpt", stage, world=3), bits=True)


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank(pool: Pool, stage: int) -> None:
    check(pool.run(both, "world", "odd", stage, world=1), bits=True)
