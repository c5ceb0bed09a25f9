"""Every schedule of torch.distributed.pipelining gives one process's losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules

from helpers.pool import Pool
from training.models import BATCH, STEPS, WIDTH, batch, loss_of, sgd

MICROBATCHES = 8
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
# All that the installed torch has, and how many stages each rank holds.
STAGES_PER_RANK = {
    name: 1 if issubclass(getattr(schedules, name), schedules.PipelineScheduleSingle) else 2
    for name in dir(schedules)
    if name.startswith("Schedule") and hasattr(pipelining, name)
}


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(5)
    parts: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count - 1)
    ]
    return [*parts, nn.Linear(WIDTH, 1)]


def stages_of(name: str, rank: int, world: int) -> list[int]:
    per_rank = STAGES_PER_RANK[name]
    if name in V_SHAPED:  # down the ranks and up again
        return [rank, 2 * world - 1 - rank]
    return [rank + world * turn for turn in range(per_rank)]


def schedule_of(name: str, parts: list[nn.Module]) -> tuple[Any, list[int]]:
    world = dist.get_world_size()
    indices = stages_of(name, dist.get_rank(), world)
    stages = [
        PipelineStage(parts[index], index, len(parts), torch.device("cpu")) for index in indices
    ]
    kind = getattr(schedules, name)
    if issubclass(kind, schedules.PipelineScheduleSingle):
        return kind(stages[0], MICROBATCHES, loss_fn=loss_of), indices
    return kind(stages, MICROBATCHES, loss_fn=loss_of), indices


def run(name: str) -> tuple[list[float], list[float]]:
    """Losses of the last stage's rank (none on others), and those of one process."""
    count = STAGES_PER_RANK[name] * dist.get_world_size()
    parts = layers(count)
    schedule, indices = schedule_of(name, parts)
    mine = nn.ModuleList(parts[index] for index in indices)
    optimizer = sgd(mine.parameters())
    found = []
    for step in range(STEPS):
        x, y = batch(step)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        arguments = (x,) if 0 in indices else ()
        last = {"target": y, "losses": losses} if count - 1 in indices else {}
        schedule.step(*arguments, **last)
        optimizer.step()
        if losses:
            found.append(torch.stack(losses).mean().item())
    whole = nn.Sequential(*layers(count))
    expected = alone(whole)
    for index in indices:
        for ours, theirs in zip(parts[index].parameters(), whole[index].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    return found, expected


def alone(model: nn.Module) -> list[float]:
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_there_are_schedules() -> None:
    assert {"ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"} <= set(STAGES_PER_RANK)
    assert BATCH % MICROBATCHES == 0


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", STAGES_PER_RANK)
def test_schedule(pool: Pool, name: str, world: int) -> None:
    found = pool.run(run, name, world=world)
    holders = [losses for losses, _ in found if losses]
    assert len(holders) == 1
    assert holders[0] == pytest.approx(found[0][1], rel=1e-5)
