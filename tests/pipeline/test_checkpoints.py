"""Checkpoints by the whole module's names: at another number of stages, and without a pipeline."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import dreamcomm
from dreamcomm import zero
from dreamcomm.pipeline import Pipeline
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from pipeline.pipe_models import MODELS, Gpt, next_token

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NAME = "gpt"


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Gpt(dropout, blocks=4)


def state_of(module: nn.Module, optimizer: Any, steps: int) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(module),
        "optimizer": get_optimizer_state_dict(module, optimizer, options=FLAT),
        "steps": steps,
    }


def restore(module: nn.Module, optimizer: Any, folder: str) -> int:
    state = state_of(module, optimizer, 0)
    zero.load(state, folder)
    set_model_state_dict(module, state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"], options=FLAT)
    return int(state["steps"])


def digest(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(
            one.detach().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, one in tensors.items()
    }


def piped(
    folder: str, begin: int, end: int, how: str, schedule: str, saves: bool, dropout: float = 0.0
) -> tuple[list[float], dict[str, str], dict[str, str]]:
    """Trains some steps from a checkpoint; losses, and digests at the beginning and the end."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pipe", "data"))
    if how != "sgd":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("pipe", "data"))
    group, share = mesh["data"].get_group(), mesh.get_local_rank("data")
    shares = mesh["data"].size()
    pipe = Pipeline(
        model(dropout), 2, schedule=schedule, loss_fn=next_token, mesh=mesh, loss="all", seed=3
    )
    options = {"lr": 1e-3}
    if how.startswith("zero"):
        optimizer: Any = ZeroOptimizer(
            pipe.parameters(), torch.optim.AdamW, group, stage=int(how[-1]), **options
        )
    else:
        optimizer = torch.optim.AdamW(pipe.parameters(), foreach=False, **options)
    keep = (
        dreamcomm.DistributedDataParallel(pipe.module, process_group=group)
        if how == "ddp"
        else None
    )
    if begin:
        pipe.steps = restore(pipe.module, optimizer, folder)
        assert pipe.steps == begin
    first = digest(dict(pipe.named_parameters()))
    losses = []
    for step in range(begin, end):
        x, y = (one.chunk(shares)[share] for one in MODELS[NAME][2](step, 8, torch.float32))
        optimizer.zero_grad()
        found: list[Tensor] = []
        pipe.step(x, target=y, losses=found)
        optimizer.step()
        total = torch.stack(found).mean()
        dist.all_reduce(total, group=group)
        losses.append(float(total) / shares)
    if saves:
        zero.save(state_of(pipe.module, optimizer, pipe.steps), folder)
    del keep
    return losses, first, digest(dict(pipe.named_parameters()))


CELLS = [
    ("sgd", "1f1b", 2),
    ("sgd", "zb-h1", 4),
    ("sgd", "interleaved1f1b", 2),
    ("sgd", "gpipe", 1),
    ("zero1", "1f1b", 4),
    ("zero2", "gpipe", 2),
    ("ddp", "1f1b", 4),
]


@pytest.mark.parametrize("source", [0, 4, pytest.param(3, marks=pytest.mark.long)])
def test_from_one_cell_into_others(pool: Pool, tmp_path: Path, source: int) -> None:
    folder = str(tmp_path / "saved")
    how, schedule, world = CELLS[source]
    ranks = pool.run(piped, folder, 0, 3, how, schedule, True, world=world)
    saved: dict[str, str] = {}
    for _, _, last in ranks:
        saved |= last
    straight = pool.run(piped, folder + "-all", 0, 5, "sgd", "1f1b", False, world=2)[0][0]
    for how, schedule, world in CELLS:
        ranks = pool.run(piped, folder, 3, 5, how, schedule, False, world=world)
        loaded: dict[str, str] = {}
        for losses, first, _ in ranks:
            assert losses == pytest.approx(straight[3:], rel=1e-4)
            loaded |= first
        assert loaded == saved, "the layers' checksums"


def resumed(folder: str, how: str, schedule: str) -> tuple[list[float], list[float]]:
    whole, _, _ = piped(folder + "-whole", 0, 4, how, schedule, False, 0.2)
    first, _, _ = piped(folder, 0, 2, how, schedule, True, 0.2)
    second, _, _ = piped(folder, 2, 4, how, schedule, False, 0.2)
    return whole, first + second


@pytest.mark.parametrize(("how", "schedule"), [("sgd", "1f1b"), ("zero2", "zb-h1")])
def test_a_resumed_run_has_the_same_bits(
    pool: Pool, tmp_path: Path, how: str, schedule: str
) -> None:
    world = 2 if how == "sgd" else 4
    for whole, parts in pool.run(resumed, str(tmp_path / "saved"), how, schedule, world=world):
        assert whole == parts


def test_into_one_process_and_back(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    ranks = pool.run(piped, folder, 0, 3, "sgd", "1f1b", True, world=4)
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    state = state_of(module, optimizer, 0)
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"], options=FLAT)
    assert state["steps"] == 3
    found = digest(dict(module.named_parameters()))
    for _, _, last in ranks:
        assert all(found[name] == text for name, text in last.items())
    step = next(iter(optimizer.state.values()))["step"]
    assert float(step) == 3.0

    torch.save(module.state_dict(), tmp_path / "plain.pt")
    for loaded in pool.run(from_plain, str(tmp_path / "plain.pt"), world=2):
        assert all(found[name] == text for name, text in loaded.items())


def from_plain(path: str) -> dict[str, str]:
    pipe = Pipeline(Gpt(dropout=0.1, blocks=4), 2, loss_fn=next_token)
    pipe.load_state_dict(torch.load(path))
    return digest(dict(pipe.named_parameters()))


def unfit() -> list[str]:
    pipe = Pipeline(Gpt(blocks=4), 2, loss_fn=next_token)
    texts = []
    for bad in ({}, {**Gpt(blocks=4).state_dict(), "extra": torch.ones(1)}):
        try:
            pipe.load_state_dict(bad)
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_state_dicts_that_do_not_fit(pool: Pool) -> None:
    for missing, _ in pool.run(unfit):
        assert "Missing key" in missing
