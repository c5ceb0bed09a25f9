"""Distributed checkpoints: saved, saved aside, loaded again, by sharded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers.pool import Pool
from training.models import Mlp, adam, batch, loss_of, shard


def make() -> tuple[Any, torch.optim.Optimizer]:
    model: Any = Mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, adam(model.parameters())


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = (shard(part, dist.get_rank(), dist.get_world_size()) for part in batch(step))
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def save_and_resume(folder: str, aside: bool) -> tuple[list[float], list[float]]:
    """Losses after the checkpoint: of the run that wrote it, and of one that loads it."""
    model, optimizer = make()
    train(model, optimizer, range(3))
    state = state_of(model, optimizer)
    if aside:
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)
    onward = train(model, optimizer, range(3, 6))

    model, optimizer = make()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return onward, train(model, optimizer, range(3, 6))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("aside", [False, True], ids=["save", "async_save"])
def test_a_run_resumes_from_its_checkpoint(
    pool: Pool, tmp_path: Path, aside: bool, world: int
) -> None:
    for onward, resumed in pool.run(save_and_resume, str(tmp_path / "point"), aside, world=world):
        assert resumed == onward


def save(folder: str) -> float:
    model, optimizer = make()
    train(model, optimizer, range(3))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return whole_sum(model)


def load(folder: str) -> float:
    model, _ = make()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return whole_sum(model)


def whole_sum(model: Any) -> float:
    return float(sum(p.full_tensor().double().sum().item() for p in model.parameters()))


def test_another_number_of_ranks_loads_it(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "point")
    saved = pool.run(save, folder, world=4)
    assert pool.run(load, folder, world=2) == saved[:2]
