"""Schedules from CSV files run, such as torch's: other placements, and overlapped actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import schedules as torchs

from dreamcomm.pipeline import Pipeline, read_csv
from helpers.pool import Pool
from pipeline.pipe_models import MODELS, OneProcess, make
from pipeline.test_torch_schedules import made_by_torch

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def train(path: str) -> tuple[list[float], dict[str, Tensor]]:
    schedule = read_csv(path)
    pipe = Pipeline(
        make("gpt"), schedule.microbatches, schedule=schedule, loss_fn=MODELS["gpt"][1], loss="all"
    )
    x, y = MODELS["gpt"][2](0, 8, torch.float32)
    losses: list[Tensor] = []
    pipe.step(x, target=y, losses=losses)
    gradients: dict[str, Any] = {n: one.grad for n, one in pipe.named_parameters()}
    return [float(one) for one in losses], gradients


@pytest.mark.parametrize(
    ("name", "local", "micro", "form"),
    [
        ("LoopedBFS", 2, 4, "compute_comms"),
        ("InterleavedZeroBubble", 2, 4, "compute_comms"),
        ("ZBVZeroBubble", 2, 4, "compute_only"),
        ("DualPipeV", 2, 4, "compute_comms"),
    ],
)
def test_torch_schedules_train(
    pool: Pool, tmp_path: Path, name: str, local: int, micro: int, form: str
) -> None:
    path = str(tmp_path / "schedule.csv")
    torchs_own = made_by_torch(name, local, 2, micro)
    torchs_own._dump_csv(path, form)
    assert issubclass(type(torchs_own), torchs._PipelineScheduleRuntime)
    reference = OneProcess("gpt")
    losses = reference.gradients(0, 8, micro)
    for got, gradients in pool.run(train, path):
        assert got == pytest.approx(losses, rel=1e-5)
        expected = dict(reference.module.named_parameters())
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[key].grad, rtol=1e-5, atol=1e-7)
