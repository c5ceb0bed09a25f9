"""A pipeline trains as one process does that runs the same micro-batches and accumulates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dreamcomm.pipeline import Pipeline
from helpers.pool import Pool
from pipeline.pipe_models import MODELS, OneProcess, make, optimizer_of

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

SCHEDULES = ["gpipe", "1f1b", "interleaved1f1b", "zb-h1"]
STEPS, FEWER, ROWS = 20, 8, 10  # FEWER: in the short form


def train(
    name: str, schedule: str, micro: int, dtype: torch.dtype, steps: int, **options: Any
) -> tuple[list[list[float]], list[float], dict[str, Tensor]]:
    """Losses, norms, and the parameters and buffers of this rank."""
    _, loss_fn, data = MODELS[name]
    pipe = Pipeline(
        make(name, dtype), micro, schedule=schedule, loss_fn=loss_fn, loss="all", **options
    )
    optimizer = optimizer_of(pipe.parameters())
    losses, norms = [], []
    for step in range(steps):
        x, y = data(step, ROWS, dtype)
        optimizer.zero_grad()
        found: list[Tensor] = []
        pipe.step(x, target=y, losses=found)
        losses.append([float(one) for one in found])
        norms.append(float(pipe.clip_grad_norm_(float("inf"))))
        optimizer.step()
    return losses, norms, {k: v.clone() for k, v in pipe.state_dict().items()}


def compare(
    ranks: list[Any], name: str, micro: int, dtype: torch.dtype, steps: int = STEPS
) -> None:
    reference = OneProcess(name, dtype)
    losses, norms = reference.train(steps, ROWS, micro)
    within = 1e-9 if dtype == torch.float64 else 1e-5
    close = {"rtol": within, "atol": within}
    expected = dict(reference.module.named_parameters())
    found: dict[str, Tensor] = {}
    for got_losses, got_norms, state in ranks:
        torch.testing.assert_close(torch.tensor(got_losses), torch.tensor(losses), **close)
        torch.testing.assert_close(torch.tensor(got_norms), torch.tensor(norms), rtol=1e-5, atol=0)
        found |= state
    assert set(expected) <= set(found)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value.detach(), **close)


FLOAT32, FLOAT64 = torch.float32, torch.float64
SHORT = [
    ("mlp", "1f1b", 2, FLOAT64),
    ("mlp", "interleaved1f1b", 3, FLOAT32),
    ("cnn", "1f1b", 3, FLOAT32),
    ("cnn", "zb-h1", 2, FLOAT64),
    ("gpt", "gpipe", 4, FLOAT32),
    ("gpt", "interleaved1f1b", 2, FLOAT32),
    ("gpt", "zb-h1", 3, FLOAT64),
]
CELLS = [
    (name, schedule, world, dtype)
    for name in MODELS
    for schedule in SCHEDULES
    for world in (2, 3, 4)
    for dtype in (FLOAT32, FLOAT64)
]


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=[] if c in SHORT else [pytest.mark.long]) for c in CELLS],
    ids=lambda cell: "-".join(map(str, cell)),
)
def test_equals_one_process(
    pool: Pool, cell: tuple[str, str, int, torch.dtype], soak: bool
) -> None:
    name, schedule, world, dtype = cell
    micro, steps = 3 if schedule == "gpipe" else 4, STEPS if soak else FEWER
    ranks = pool.run(train, name, schedule, micro, dtype, steps, world=world)
    compare(ranks, name, micro, dtype, steps)


def twice(name: str, schedule: str) -> bool:
    """Whether two runs have the same bits."""
    first, second = (train(name, schedule, 3, torch.float32, steps=5) for _ in range(2))
    equal = all(torch.equal(first[2][key], second[2][key]) for key in first[2])
    return equal and first[:2] == second[:2]


@pytest.mark.parametrize(
    ("name", "schedule"), [("gpt", "1f1b"), ("cnn", "zb-h1"), ("mlp", "interleaved1f1b")]
)
def test_two_runs_have_the_same_bits(pool: Pool, name: str, schedule: str) -> None:
    assert pool.run(twice, name, schedule) == [True, True]


@pytest.mark.parametrize(
    "options", [{"hosts": "a,b"}, {"shared_memory": False}, {"heap_bytes": 0}], ids=str
)
def test_without_shared_memory(pool: Pool, options: dict[str, Any]) -> None:
    """Between nodes, over Gloo, and where there is no heap, messages are sent."""
    ranks = pool.run(train, "gpt", "1f1b", 4, FLOAT32, FEWER, options=options)
    compare(ranks, "gpt", 4, FLOAT32, FEWER)
