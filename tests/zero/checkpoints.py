"""What tests of checkpoints do in ranks, and alone: make, train, save and load."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import dreamcomm
from ddp.models import batch, rows_of
from dreamcomm.zero import ZeroOptimizer
from zero.units.sharding import made, shard

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
}
Bits = dict[str, Any]


def build(
    model: str, kind: str, how: str, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module with its optimizer.

    Args:
        how: "1", "2": a ZeroOptimizer of that stage; "wrapped 2": around a
            DistributedDataParallel's parameters; "3": of a module under fully_shard; "torch 3",
            "ddp", "alone": with torch's optimizer.
        more: of the ZeroOptimizer.
    """
    module = made(model).to(dtype)
    if how.startswith("wrapped") or how == "ddp":
        module = dreamcomm.DistributedDataParallel(module, bucket_cap_mb=0.2)
    if how.endswith("3"):
        shard(module)
    optimizer, options = OPTIMIZERS[kind]
    if how in ("ddp", "alone", "torch 3"):
        return module, optimizer(module.parameters(), foreach=False, **options)  # type: ignore[call-arg]
    stage = int(how[-1])
    return module, ZeroOptimizer(module.parameters(), optimizer, stage=stage, **more, **options)


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, steps: range, dtype: Any = torch.float32
) -> list[float]:
    """This rank's losses."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in steps:
        x, y = (rows_of(one, rank, world) for one in batch(step, dtype))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer, **how: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(module, optimizer, **how)
    return {"model": weights, "optimizer": moments}


def save(module: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    dcp.save(state_of(module, optimizer), checkpoint_id=folder)


def load(module: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    state = state_of(module, optimizer)
    dcp.load(state, checkpoint_id=folder)
    put(module, optimizer, state)


def put(module: nn.Module, optimizer: torch.optim.Optimizer, state: Any, **how: Any) -> None:
    set_model_state_dict(module, state["model"], **how)
    set_optimizer_state_dict(module, optimizer, state["optimizer"], **how)


def whole(value: Any) -> Any:
    """A copy: a DTensor's as a whole tensor. Collective."""
    if isinstance(value, dict):
        return {str(key): whole(part) for key, part in value.items()}
    if isinstance(value, list):
        return [whole(part) for part in value]
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone().contiguous() if isinstance(value, Tensor) else value


def bits(module: nn.Module, optimizer: torch.optim.Optimizer) -> Bits:
    """Weights, state and groups by global names, whole. Collective."""
    found: Bits = whole(state_of(module, optimizer))
    for group in found["optimizer"]["param_groups"]:
        group.pop("foreach")  # torch's own optimizers are made without, for their bits
    return found


def check_same(one: Any, other: Any, place: str = "") -> None:
    """The same keys, and the same bits."""
    assert type(one) is type(other), f"{place}: {type(one)}, {type(other)}"
    if isinstance(one, dict):
        assert one.keys() == other.keys(), f"{place}: {one.keys() ^ other.keys()}"
        for key in one:
            check_same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for number, (part, counterpart) in enumerate(zip(one, other, strict=True)):
            check_same(part, counterpart, f"{place}.{number}")
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype, place
        assert torch.equal(one, other), place
    else:
        assert one == other, f"{place}: {one} != {other}"
