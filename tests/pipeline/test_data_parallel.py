"""Pipelines side by side: DistributedDataParallel and ZeroOptimizer around the stages."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dreamcomm
from dreamcomm.buckets.found import engines_of
from dreamcomm.pipeline import Pipeline, PipelineError
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from pipeline.pipe_models import MODELS, OneProcess, make, optimizer_of

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

ROWS = 8  # of each pipeline
SGD = {"lr": 0.05, "momentum": 0.9}


def mesh_of_four() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))


def train(name: str, schedule: str, how: str, steps: int, runs: int = 1) -> list[Any]:
    """For each run the losses, norms, state and the number of reductions."""
    mesh = mesh_of_four()
    data_group, share = mesh["data"].get_group(), mesh.get_local_rank("data")
    _, loss_fn, data = MODELS[name]
    results = []
    for _ in range(runs):
        pipe = Pipeline(
            make(name), 4, schedule=schedule, loss_fn=loss_fn, mesh=mesh, loss="all", seed=1
        )
        keep: Any = None
        if how == "ddp":
            keep = dreamcomm.DistributedDataParallel(pipe.module, process_group=data_group)
            optimizer = optimizer_of(pipe.parameters())
        else:
            optimizer = ZeroOptimizer(
                pipe.parameters(), torch.optim.SGD, data_group, stage=int(how[-1]), **SGD
            )
        (engine,), _ = engines_of(pipe.parameters())
        losses, norms = [], []
        for step in range(steps):
            x, y = (one.chunk(2)[share] for one in data(step, 2 * ROWS, torch.float32))
            optimizer.zero_grad()
            found: list[Tensor] = []
            pipe.step(x, target=y, losses=found)
            losses.append([float(one) for one in found])
            norms.append(float(pipe.clip_grad_norm_(float("inf"))))
            optimizer.step()
        state = {k: v.detach().clone() for k, v in pipe.named_parameters()}
        results.append((losses, norms, state, engine.passes))
        del keep, optimizer, engine
    return results


SHORT = [("gpt", "1f1b", "zero2"), ("gpt", "zb-h1", "ddp"), ("cnn", "interleaved1f1b", "zero1")]
CELLS = [
    (name, schedule, how)
    for name in MODELS
    for schedule in ("gpipe", "1f1b", "interleaved1f1b", "zb-h1")
    for how in ("ddp", "zero1", "zero2")
]


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=[] if c in SHORT else [pytest.mark.long]) for c in CELLS],
    ids="-".join,
)
def test_two_by_two_equals_one_process(pool: Pool, cell: tuple[str, str, str], soak: bool) -> None:
    name, schedule, how = cell
    steps = 20 if soak else 4
    ranks = pool.run(train, name, schedule, how, steps, 2, world=4)
    reference = OneProcess(name)
    losses, norms = reference.train(steps, ROWS, 4, shares=2)
    state: dict[str, Tensor] = {}
    for rank, (first, second) in enumerate(ranks):
        assert first[:2] == second[:2], "two runs differ"
        assert all(torch.equal(first[2][key], second[2][key]) for key in first[2])
        share = slice(0, 4) if rank % 2 == 0 else slice(4, 8)
        expected = [of_step[share] for of_step in losses]
        torch.testing.assert_close(
            torch.tensor(first[0]), torch.tensor(expected), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(torch.tensor(first[1]), torch.tensor(norms), rtol=1e-5, atol=0)
        state |= first[2]
        assert first[3] == steps, "one reduction a step"
    for key, value in reference.module.named_parameters():
        torch.testing.assert_close(state[key], value.detach(), rtol=1e-5, atol=1e-5)
    for a, b in ((0, 1), (2, 3)):  # the ranks of a stage
        assert all(torch.equal(ranks[a][0][2][k], ranks[b][0][2][k]) for k in ranks[a][0][2])


def tied_copies(stage: int) -> list[Tensor]:
    """The embedding after each of 20 steps, with momentum. Nothing is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return embeddings(stage)


def embeddings(stage: int) -> list[Tensor]:
    mesh = mesh_of_four()
    pipe = Pipeline(make("gpt"), 2, loss_fn=MODELS["gpt"][1], mesh=mesh)
    optimizer = ZeroOptimizer(
        pipe.parameters(), torch.optim.AdamW, mesh["data"].get_group(), stage=stage, lr=1e-2
    )
    name = "embedding.weight"
    seen = []
    for step in range(20):
        x, y = MODELS["gpt"][2](step, 8, torch.float32)
        share = mesh.get_local_rank("data")
        optimizer.zero_grad()
        pipe.step(x.chunk(2)[share], target=y.chunk(2)[share])
        optimizer.step()
        seen.append(dict(pipe.named_parameters())[name].detach().clone())
    return seen


@pytest.mark.parametrize("stage", [1, 2])
def test_tied_copies_in_different_shards_stay_equal(pool: Pool, stage: int) -> None:
    ranks = pool.run(tied_copies, stage, world=4)
    for copies in zip(*ranks, strict=True):
        assert all(torch.equal(one, copies[0]) for one in copies)
    assert not torch.equal(ranks[0][0], ranks[0][-1])


def without_anything_that_reduces() -> str:
    mesh = mesh_of_four()
    pipe = Pipeline(make("mlp"), 2, loss_fn=MODELS["mlp"][1], mesh=mesh)
    x, y = MODELS["mlp"][2](0, 8, torch.float32)
    try:
        pipe.step(x, target=y)
    except PipelineError as error:
        alone = Pipeline(make("mlp"), 2, loss_fn=MODELS["mlp"][1], mesh=mesh["pipe"])
        alone.step(x, target=y)
        return str(error)
    return ""


def test_gradients_are_never_silently_local(pool: Pool) -> None:
    for text in pool.run(without_anything_that_reduces, world=4):
        assert "nothing averages the gradients" in text
        assert "DistributedDataParallel" in text


def accumulated(how: str) -> tuple[Tensor, Tensor, list[int]]:
    """Gradients of three steps, reduced at the end only, and of one step with all rows."""
    mesh = mesh_of_four()
    share, group = mesh.get_local_rank("data"), mesh["data"].get_group()
    found = []
    passes = []
    for windows in (3, 1):
        pipe = Pipeline(
            make("mlp"), 12 // windows, loss_fn=MODELS["mlp"][1], mesh=mesh, accumulate=windows
        )
        wrapper = dreamcomm.DistributedDataParallel(pipe.module, process_group=group)
        data = [MODELS["mlp"][2](step, 24, torch.float32) for step in range(3)]
        if windows == 1:
            data = [tuple(torch.cat([one[k] for one in data]) for k in (0, 1))]  # type: ignore[misc]
        mine = [tuple(self_rows(part, share, windows) for part in one) for one in data]
        for number, (x, y) in enumerate(mine):
            if number < len(mine) - 1:
                with pipe.no_sync():
                    pipe.step(x, target=y)
            else:
                pipe.step(x, target=y)
        found.append(torch.cat([one.grad.flatten() for one in pipe.parameters()]))
        passes.append(engines_of(pipe.parameters())[0][0].passes)
        del wrapper, pipe
    return found[0], found[1], passes


def self_rows(data: Tensor, share: int, windows: int) -> Tensor:
    """A pipeline's rows: its half of each step, also where three steps are one."""
    parts = data.chunk(3) if windows == 1 else [data]
    return torch.cat([part.chunk(2)[share] for part in parts])


def test_no_sync_reduces_once(pool: Pool) -> None:
    for three, one, passes in pool.run(accumulated, "ddp", world=4):
        torch.testing.assert_close(three, one, rtol=1e-5, atol=1e-7)
        assert passes == [1, 1]


def two_steps_of_zero2() -> list[float]:
    """Norms after a step, and after a second one without zero_grad()."""
    mesh = mesh_of_four()
    share = mesh.get_local_rank("data")
    pipe = Pipeline(make("mlp"), 2, loss_fn=MODELS["mlp"][1], mesh=mesh)
    zero = ZeroOptimizer(
        pipe.parameters(), torch.optim.SGD, mesh["data"].get_group(), stage=2, lr=0.1
    )
    norms = []
    for _ in range(2):
        x, y = (one.chunk(2)[share] for one in MODELS["mlp"][2](0, 8, torch.float32))
        pipe.step(x, target=y)
        norms.append(float(pipe.clip_grad_norm_(float("inf"))))
    zero.zero_grad(set_to_none=False)
    pipe.step(x, target=y)
    norms.append(float(pipe.clip_grad_norm_(float("inf"))))
    return norms


def test_zero_2_accumulates_over_steps(pool: Pool) -> None:
    for one, two, again in pool.run(two_steps_of_zero2, world=4):
        assert two == pytest.approx(2 * one, rel=1e-5)
        assert again == pytest.approx(one, rel=1e-5)


def wrong_group() -> str:
    pipe = Pipeline(make("mlp"), 2, loss_fn=MODELS["mlp"][1], mesh=mesh_of_four())
    keep = dreamcomm.DistributedDataParallel(pipe.module, process_group=two_of_a_stage())
    x, y = MODELS["mlp"][2](0, 8, torch.float32)
    with pytest.raises(PipelineError) as caught:
        pipe.step(x, target=y)
    del keep
    return str(caught.value)


def two_of_a_stage() -> Any:
    """One rank alone, where both pipelines' should be."""
    groups = [dist.new_group([rank]) for rank in range(4)]
    return groups[dist.get_rank()]


def test_a_wrapper_over_other_ranks_is_refused(pool: Pool) -> None:
    for text in pool.run(wrong_group, world=4):
        assert "over 1 ranks, and 2 pipelines" in text
