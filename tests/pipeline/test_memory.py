"""Which activations a stage keeps: counted, and seen to be freed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dreamcomm.pipeline import Pipeline
from helpers.pool import Pool
from pipeline.pipe_models import MODELS, OneProcess, make

pytestmark = pytest.mark.beyond_gloo("checks what only dreamcomm does")


def live(schedule: str, micro: int, per_rank: int) -> dict[int, int]:
    torch.manual_seed(0)
    count = per_rank * torch.distributed.get_world_size()
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    pipe = Pipeline(module, micro, schedule=schedule, loss_fn=F.mse_loss, stages=count)
    x = torch.ones(micro, 4)
    pipe.step(x, target=x)
    return pipe.report().live_peak


@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_as_many_micro_batches_as_the_schedule_says(pool: Pool, schedule: str, micro: int) -> None:
    for stage, peaks in enumerate(pool.run(live, schedule, micro, 1, world=3)):
        assert peaks == {stage: micro if schedule == "gpipe" else min(micro, 3 - stage)}


class Probe(torch.autograd.Function):
    """Counts, in its first backward pass, which outputs of the stage are still there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: Watched) -> Tensor:
        ctx.stage = stage
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        stage = ctx.stage
        if stage.alive is None:
            stage.alive = sum(one() is not None for one in stage.outputs)
        return gradient, None


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.outputs: list[Any] = []
        self.alive: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Probe.apply(self.linear(x), self)
        self.outputs.append(weakref.ref(out))
        return out


def kept(checkpoint: bool) -> tuple[int | None, int]:
    torch.manual_seed(0)
    module = nn.Sequential(Watched(), Watched())
    pipe = Pipeline(module, 6, schedule="gpipe", loss_fn=F.mse_loss, checkpoint=checkpoint)
    x = torch.ones(6 * 512, 64)
    gc.disable()
    try:
        pipe.step(x, target=x, return_outputs=False)
        (stage,) = pipe.module.children()
        assert isinstance(stage, Watched)
        left = sum(one() is not None for one in stage.outputs)
        return stage.alive, left
    finally:
        gc.enable()


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpoint"])
def test_outputs_are_freed_when_they_are_sent(pool: Pool, checkpoint: bool) -> None:
    first, last = pool.run(kept, checkpoint)
    # The last micro-batch's output may be on its way; no other one is needed for a backward pass.
    assert first[0] is not None
    assert first[0] <= 1
    for _, left in (first, last):
        assert left == 0


def evaluated() -> int:
    torch.manual_seed(0)
    module = nn.Sequential(Watched(), Watched())
    pipe = Pipeline(module, 4, loss_fn=F.mse_loss)
    gc.disable()
    try:
        pipe.eval(torch.ones(8, 64), return_outputs=False)
        (stage,) = pipe.module.children()
        assert isinstance(stage, Watched)
        return sum(one() is not None for one in stage.outputs)
    finally:
        gc.enable()


def test_evaluation_keeps_nothing(pool: Pool) -> None:
    assert pool.run(evaluated) == [0, 0]


def freed(name: str) -> tuple[set[str], set[str], list[float]]:
    """The names of tensors with memory and without, in the given module; and a step's losses."""
    module = make(name)
    pipe = Pipeline(module, 2, loss_fn=MODELS[name][1], loss="all", free_others=True)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    without = {key for key, one in named.items() if one.is_meta}
    x, y = MODELS[name][2](0, 4, torch.float32)
    losses: list[Tensor] = []
    pipe.step(x, target=y, losses=losses)
    assert {key for key, _ in pipe.named_parameters()} <= named.keys() - without
    return named.keys() - without, without, [float(one) for one in losses]


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_stages_of_other_ranks_are_freed(pool: Pool, name: str) -> None:
    reference = OneProcess(name)
    losses = reference.gradients(0, 4, 2)
    ranks = pool.run(freed, name)
    everything = ranks[0][0] | ranks[0][1]
    assert ranks[0][0] | ranks[1][0] == everything
    shared = {"embedding.weight"} if name == "gpt" else set()
    assert ranks[0][0] & ranks[1][0] == shared
    for kept, without, found in ranks:
        assert kept
        assert without
        assert found == pytest.approx(losses, rel=1e-5)


def on_meta() -> list[float]:
    """A module without memory, of which each rank makes its own part."""
    with torch.device("meta"):
        module = make("gpt")
    pipe = Pipeline(module, 2, loss_fn=MODELS["gpt"][1], loss="all")
    pipe.module.to_empty(device="cpu")
    pipe.load_state_dict(make("gpt").state_dict())
    x, y = MODELS["gpt"][2](0, 4, torch.float32)
    losses: list[Tensor] = []
    pipe.step(x, target=y, losses=losses)
    return [float(one) for one in losses]


def test_a_module_without_memory(pool: Pool) -> None:
    losses = OneProcess("gpt").gradients(0, 4, 2)
    for found in pool.run(on_meta):
        assert found == pytest.approx(losses, rel=1e-5)
