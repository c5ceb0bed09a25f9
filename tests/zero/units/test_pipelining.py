"""torch's pipelines with stages under fully_shard: the losses and weights of torch's FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from training.models import BATCH, STEPS, WIDTH, batch, loss_of, sgd
from zero.units.sharding import whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

MICROBATCHES = 4


def stage_module(index: int, count: int) -> nn.Sequential:
    torch.manual_seed(5 + index)
    last = index == count - 1
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1 if last else WIDTH))


def trained(shards: Any, name: str) -> tuple[list[float], list[Tensor]]:
    """Losses on the ranks of the last stage, and this rank's weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    pipe, data = mesh["pipe"], mesh["data"]
    kind = getattr(schedules, name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    count = 2 if single else 4
    rank = pipe.get_local_rank()
    indices = [rank] if single else [rank, rank + 2]
    parts = [stage_module(index, count) for index in indices]
    for part in parts:
        for layer in (part[0], part[2], part):
            shards(layer, mesh=data)
    stages = [
        PipelineStage(part, index, count, torch.device("cpu"), group=pipe.get_group())
        for part, index in zip(parts, indices, strict=True)
    ]
    schedule = kind(stages[0] if single else stages, MICROBATCHES, loss_fn=loss_of)
    optimizer = sgd([one for part in parts for one in part.parameters()])
    found = []
    for step in range(STEPS):
        x, y = (one.chunk(2)[data.get_local_rank()] for one in batch(step))
        losses: list[Tensor] = []
        optimizer.zero_grad()
        last = {"target": y, "losses": losses} if count - 1 in indices else {}
        schedule.step(*((x,) if 0 in indices else ()), **last)
        optimizer.step()
        if losses:
            found.append(torch.stack(losses).mean().item())
    return found, [whole(one) for part in parts for one in part.parameters()]


def both(name: str) -> tuple[Any, Any]:
    return trained(torchs.fully_shard, name), trained(fully_shard, name)


@pytest.mark.parametrize(
    "name",
    ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"],
)
def test_a_stage_under_fully_shard(pool: Pool, name: str) -> None:
    assert BATCH % (2 * MICROBATCHES) == 0
    for (losses, weights), (ours, our_weights) in pool.run(both, name, world=4):
        assert losses == pytest.approx(ours, rel=1e-6)
        for a, b in zip(weights, our_weights, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_loss_was_compared(pool: Pool) -> None:
    found = pool.run(both, "ScheduleGPipe", world=4)
    assert sorted(len(ours[0]) for _, ours in found) == [0, 0, STEPS, STEPS]
