"""Steps under random delays: no order of events hangs, or changes a bit."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from dreamcomm.pipeline import MicroBatches, Pipeline, PipelineError, Skip
from dreamcomm.pipeline.messages.channel import Channel
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("checks what only dreamcomm does")

WIDTH = 8
SCHEDULES = ["gpipe", "1f1b", "interleaved1f1b", "zb-h1"]


class Layer(nn.Module):
    """Some of these hand values over to a later one."""

    def __init__(self, stashes: Skip | None = None, pops: Skip | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stashes, self.pops = stashes, pops

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        if self.pops is not None:
            x = x + self.pops.pop()
        if self.stashes is not None:
            self.stashes.stash(x)
        return x


def model() -> nn.Sequential:
    torch.manual_seed(0)
    skip = Skip()
    layers = [Layer() for _ in range(6)]
    tied = nn.Linear(WIDTH, WIDTH)
    tied.weight = layers[0].linear.weight
    return nn.Sequential(
        *layers[:2], Layer(stashes=skip), *layers[2:5], Layer(pops=skip), layers[5], tied
    )


def late(generator: random.Random, longest: float) -> None:
    if generator.random() < 0.3:
        time.sleep(generator.random() * longest)


def delayed(channel: Channel, generator: random.Random, longest: float) -> None:
    """Has each message be sent, and looked for, a moment later."""
    messenger = channel.messenger
    send, admit = messenger._issue, messenger._admit

    def issue(*args: Any) -> None:
        late(generator, longest)
        send(*args)

    def look(*args: Any, **kwargs: Any) -> bool:
        late(generator, longest)
        return admit(*args, **kwargs)

    messenger._issue, messenger._admit = issue, look  # type: ignore[method-assign]


def steps(count: int, longest: float, seed: int) -> tuple[list[Tensor], int]:
    """The gradients' sums of each step, over all schedules; and how many steps failed, as asked."""
    rank, generator = dist.get_rank(), random.Random(seed * 100 + dist.get_rank())
    common = random.Random(seed)
    pipes = []
    for schedule in SCHEDULES:
        for micro in (1, 3, 4):
            stages = 8 if schedule == "interleaved1f1b" else 4
            pipe = Pipeline(
                model(), micro, schedule=schedule, loss_fn=F.mse_loss, stages=stages, blocks=None
            )
            delayed(pipe._steps._channel, generator, longest)
            pipes.append(pipe)
    sums, failed = [], 0
    for _ in range(count):
        number = common.randrange(len(pipes))
        pipe, rows = pipes[number], [common.randrange(1, 4) for _ in range(16)]
        fails_on = common.randrange(4) if common.random() < 0.1 else -1
        evaluates = common.random() < 0.1
        parts = [torch.full((n, WIDTH), n / 4) for n in rows[: pipe.n_microbatches]]
        for one in pipe.parameters():
            one.grad = None
        x = MicroBatches(parts)
        if fails_on == rank:
            handle = next(iter(pipe.module.children())).register_forward_hook(_raise)
        try:
            (pipe.eval if evaluates else pipe.step)(x, target=MicroBatches(parts))
            assert fails_on < 0
        except PipelineError:
            assert fails_on >= 0
            failed += 1
        if fails_on == rank:
            handle.remove()
        grads = [one.grad.sum() for one in pipe.parameters() if one.grad is not None]
        sums.append(torch.stack(grads) if grads else torch.zeros(1))
    return sums, failed


def _raise(*_: Any) -> None:
    raise ValueError("asked to fail")


def check(pool: Pool, count: int, longest: float) -> None:
    late_ones = pool.run(steps, count, longest, 1, world=4, timeout=60 + count)
    prompt = pool.run(steps, count, 0.0, 1, world=4, timeout=60 + count)
    for (sums, failed), (expected, expected_failed) in zip(late_ones, prompt, strict=True):
        assert failed == expected_failed > 0
        for step, (a, b) in enumerate(zip(sums, expected, strict=True)):
            assert torch.equal(a, b), step


def test_random_delays_change_nothing(pool: Pool) -> None:
    check(pool, 60, 0.003)


@pytest.mark.long
def test_a_thousand_steps_under_random_delays(pool: Pool) -> None:
    check(pool, 1000, 0.005)
