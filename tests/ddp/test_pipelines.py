"""Pipelines of torch.distributed.pipelining, with copies of each stage that train together."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import dreamcomm
from helpers.pool import Pool
from training.models import BATCH, WIDTH, batch, loss_of, sgd, shard

STAGES, COPIES, STEPS, MICROBATCHES = 2, 2, 3, 4
WIDE = 192  # a matrix of WIDE x WIDE is reduced where it is
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
pytestmark = pytest.mark.beyond_gloo("the wrappers are of dreamcomm")


def layers(count: int) -> list[nn.Module]:
    """Equal weights in all calls."""
    torch.manual_seed(5)
    widths = [WIDTH, *[WIDE] * (count - 1)]
    hidden = [nn.Sequential(nn.Linear(width, WIDE), nn.Tanh()) for width in widths[: count - 1]]
    return [*hidden, nn.Linear(WIDE, 1)]


def wrapped(part: nn.Module, how: str, copies: Any) -> Any:
    if how == "replicate":
        return dreamcomm.replicate(part, mesh=copies)
    return dreamcomm.DistributedDataParallel(part, device_mesh=copies)


def numbers_of(name: str, row: int) -> list[int]:
    """The stages of a rank: one, or two of all four."""
    if issubclass(getattr(schedules, name), schedules.PipelineScheduleSingle):
        return [row]
    return [row, 2 * STAGES - 1 - row] if name in V_SHAPED else [row, STAGES + row]


def train(name: str, how: str) -> tuple[list[Tensor], list[Tensor], set[int]]:
    """Gradients of this rank's stages in the last step, those of one process, and how many passes
    have reduced in each stage after the first step, in which stages learn the shapes."""
    mesh = init_device_mesh("cpu", (STAGES, COPIES), mesh_dim_names=("pipeline", "data"))
    copies = mesh["data"]
    numbers = numbers_of(name, mesh.get_local_rank("pipeline"))
    parts = layers(STAGES * len(numbers))
    mine = [wrapped(parts[number], how, copies) for number in numbers]
    column = mesh.get_group("pipeline")
    stages = [
        PipelineStage(part, number, len(parts), torch.device("cpu"), group=column)
        for part, number in zip(mine, numbers, strict=True)
    ]
    kind: Any = getattr(schedules, name)
    schedule = kind(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
    optimizer = sgd([weight for part in mine for weight in part.parameters()])
    whole = nn.Sequential(*layers(len(parts)))
    optimizer_alone = sgd(whole.parameters())
    first = []
    for step in range(STEPS):
        x, y = (shard(data, copies.get_local_rank(), COPIES) for data in batch(step))
        optimizer.zero_grad()
        with ExitStack() as stack:
            if how == "by_hand":
                for part in mine:
                    stack.enter_context(part.no_sync())
            schedule.step(
                *((x,) if 0 in numbers else ()),
                **({"target": y} if len(parts) - 1 in numbers else {}),
            )
        if how == "by_hand":
            for part in mine:
                part.reduce_gradients()
        optimizer.step()
        x, y = batch(step)
        optimizer_alone.zero_grad()
        loss_of(whole(x), y).backward()
        optimizer_alone.step()
        first = first or [part.report().passes for part in mine]
    expected = [gradient for number in numbers for gradient in gradients(whole[number])]
    passes = {part.report().passes - one for part, one in zip(mine, first, strict=True)}
    return [gradient for part in mine for gradient in gradients(part)], expected, passes


def gradients(part: nn.Module) -> list[Tensor]:
    return [weight.grad for weight in part.parameters() if weight.grad is not None]


def check(found: list[tuple[list[Tensor], list[Tensor], set[int]]], reductions: int = 1) -> None:
    assert BATCH % (COPIES * MICROBATCHES) == 0  # else one process would weigh rows otherwise
    for ours, alone, passes in found:
        assert passes == {(STEPS - 1) * reductions}
        assert len(ours) == len(alone) > 0
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-6)
    for first in range(0, STAGES * COPIES, COPIES):  # the copies have the same bits
        assert all(map(torch.equal, found[first][0], found[first + 1][0]))


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_a_stage_reduces_in_its_last_backward_pass(pool: Pool, name: str) -> None:
    """torch's stages know that a wrapped one does."""
    check(pool.run(train, name, "ddp", world=STAGES * COPIES))


def test_a_stage_of_replicate_reduces_in_each(pool: Pool) -> None:
    check(pool.run(train, "Schedule1F1B", "replicate", world=STAGES * COPIES), MICROBATCHES)


@pytest.mark.parametrize(
    "name", ["Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"]
)
def test_stages_are_reduced_after_a_step(pool: Pool, name: str) -> None:
    """Those schedules that make a weight's gradient apart from its input's need it."""
    check(pool.run(train, name, "by_hand", world=STAGES * COPIES))
