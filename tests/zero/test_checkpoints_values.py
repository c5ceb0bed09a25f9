"""Options, further parameter groups and copies of more bits in a ZeroOptimizer's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions

from ddp.models import make
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from zero.checkpoints import bits, build, check_same, load, put, save, state_of, train, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

BF16, F32 = torch.bfloat16, torch.float32


def grouped(module: nn.Module, zero: bool) -> torch.optim.Optimizer:
    one, two = list(module.parameters())[:2], list(module.parameters())[2:]
    groups = [
        {"params": one, "lr": 2e-3, "weight_decay": 0.1},
        {"params": two, "betas": (0.8, 0.9), "tag": "second"},
    ]
    if zero:
        return ZeroOptimizer(groups, torch.optim.AdamW, lr=1e-3, stage=2)
    return torch.optim.AdamW(groups, lr=1e-3, foreach=False)


def with_scheduler(folder: str) -> Any:
    module = make("mlp")
    optimizer = grouped(module, True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(3):
        train(module, optimizer, range(step, step + 1))
        scheduler.step()
    save(module, optimizer, folder)
    kept = scheduler.state_dict()
    train(module, optimizer, range(3, 5))
    expected = bits(module, optimizer)

    module = make("mlp")
    optimizer = grouped(module, True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    load(module, optimizer, folder)
    scheduler.load_state_dict(kept)
    rates = [group["lr"] for group in optimizer.param_groups]
    train(module, optimizer, range(3, 5))
    check_same(bits(module, optimizer), expected)

    module = make("mlp")
    plain = grouped(module, False)
    load(module, plain, folder)
    options = [{k: v for k, v in g.items() if k != "params"} for g in plain.param_groups]
    return rates, scheduler.get_last_lr(), options


def test_options_of_groups(pool: Pool, tmp_path: Path) -> None:
    for rates, last, options in pool.run(with_scheduler, str(tmp_path / "point")):
        assert rates == last == [2e-3 / 8, 1e-3 / 8]
        assert [group["lr"] for group in options] == rates
        assert [group["weight_decay"] for group in options] == [0.1, 0.01]
        assert [group["betas"] for group in options] == [(0.9, 0.999), (0.8, 0.9)]
        assert options[1]["tag"] == "second"


def add_group(stage: int, master: bool) -> tuple[Any, Any]:
    module = make("mlp", BF16 if master else F32)
    first, second = list(module.parameters())[:4], list(module.parameters())[4:]
    for one in second:
        one.requires_grad_(False)
    how = {"master_dtype": F32} if master else {}
    optimizer = ZeroOptimizer(first, torch.optim.AdamW, stage=stage, lr=1e-3, **how)
    train(module, optimizer, range(2), first[0].dtype)
    optimizer.zero_grad()
    before = whole(optimizer.state_dict()["state"])
    for one in second:
        one.requires_grad_()
    optimizer.add_param_group({"params": second, "lr": 1e-2})
    after = whole(optimizer.state_dict()["state"])
    train(module, optimizer, range(2, 4), first[0].dtype)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    steps = [float(kept["step"]) for kept in state["state"].values()]
    assert steps == [4, 4, 4, 4, 2, 2]
    return before, {key: after[key] for key in before}


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_further_group_keeps_the_older_state(pool: Pool, stage: int, master: bool) -> None:
    for before, after in pool.run(add_group, stage, master):
        check_same(before, after)


def build_16(model: str, how: str, kind: str = "adamw") -> Any:
    return build(model, kind, how, BF16, master_dtype=F32)


def masters_through(model: str, how: str, folder: str, order: str) -> None:
    module, optimizer = build_16(model, how)
    train(module, optimizer, range(3), BF16)
    for one in optimizer._ordered:  # type: ignore[attr-defined]
        assert torch.equal(one.tensor.to(BF16), one.rows(one.parameter.detach()))
    save(module, optimizer, folder)
    saved = bits(module, optimizer)
    train(module, optimizer, range(3, 5), BF16)
    onward = bits(module, optimizer)

    module, optimizer = build_16(model, how)
    state = state_of(module, optimizer)
    dcp.load(state, checkpoint_id=folder)
    target = getattr(module, "module", module)
    if order == "weights last":
        optimizer.load_state_dict(by_numbers(optimizer, state["optimizer"]))
        target.load_state_dict(state["model"])
    else:
        put(module, optimizer, state)
    check_same(bits(module, optimizer), saved)
    train(module, optimizer, range(3, 5), BF16)
    check_same(bits(module, optimizer), onward)


def by_numbers(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A state of names as Optimizer.state_dict has it."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "state": {numbers[name]: kept for name, kept in state["state"].items()},
        "param_groups": optimizer.state_dict()["param_groups"],
    }


@pytest.mark.parametrize("order", ["weights first", "weights last"])
@pytest.mark.parametrize("how", ["1", "2", "wrapped 2"])
@pytest.mark.parametrize("model", ["odd", "cnn"])
def test_masters_go_through(pool: Pool, tmp_path: Path, model: str, how: str, order: str) -> None:
    pool.run(masters_through, model, how, str(tmp_path / "point"), order)


def master_hop(world: int, folder: str, begins: bool) -> Any:
    module, optimizer = build_16("odd", "2" if begins else "1")
    if begins:
        train(module, optimizer, range(3), BF16)
        save(module, optimizer, folder)
    else:
        load(module, optimizer, folder)
    assert dist.get_world_size() == world
    return bits(module, optimizer)


def test_masters_go_into_another_world(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "point")
    saved, _ = pool.run(master_hop, 2, folder, True, world=2)
    assert "master_param" in saved["optimizer"]["state"]["into.weight"]
    for loaded in pool.run(master_hop, 3, folder, False, world=3):
        check_same(loaded, saved)


def without_masters(folder: str, dtype: torch.dtype) -> str:
    module, optimizer = build("mlp", "adamw", "ddp", dtype)
    train(module, optimizer, range(2), dtype)
    save(module, optimizer, folder)
    moments = whole(state_of(module, optimizer)["optimizer"])

    other, stepper = build_16("mlp", "2")
    with pytest.raises(CheckpointException) as refused:
        load(other, stepper, folder)
    # By hand: the copies are read from the weights.
    whole_state = StateDictOptions(full_state_dict=True)
    for options in (None, whole_state):
        weights = whole(state_of(module, optimizer)["model"])
        other, stepper = build_16("mlp", "2")
        put(other, stepper, {"model": weights, "optimizer": moments}, options=options)
        train(other, stepper, range(0), BF16)
        expected = build_16("mlp", "2")[0]
        expected.load_state_dict(weights)
        onward = ZeroOptimizer(
            expected.parameters(), torch.optim.AdamW, master_dtype=F32, stage=2, lr=1e-3
        )
        onward.load_state_dict(by_numbers(onward, moments))
        train(other, stepper, range(2, 4), BF16)
        train(expected, onward, range(2, 4), BF16)
        check_same(bits(other, stepper), bits(expected, onward))
    return str(refused.value)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_checkpoint_without_masters(pool: Pool, tmp_path: Path, dtype: torch.dtype) -> None:
    for text in pool.run(without_masters, str(tmp_path / "point"), dtype):
        assert "master_param" in text


def changed_between_steps(how: str) -> tuple[list[Tensor], list[Tensor]]:
    """Other weights are loaded after the optimizer was made, and a few later changed."""
    donor = make("mlp", BF16)
    with torch.no_grad():
        for one in donor.parameters():
            one.mul_(1.5)
    found = []
    for early in (True, False):
        module = make("mlp", BF16)
        if early:
            module.load_state_dict(donor.state_dict())
        stepper = ZeroOptimizer(
            module.parameters(), torch.optim.AdamW, master_dtype=F32, stage=int(how), lr=1e-4
        )
        if not early:
            module.load_state_dict(donor.state_dict())
        train(module, stepper, range(3), BF16)
        first = next(module.parameters())
        before = whole(stepper.state_dict()["state"][0]["master_param"])
        with torch.no_grad():
            first[3] = 2.0
        after = whole(stepper.state_dict()["state"][0]["master_param"])
        assert torch.all(after[3] == 2.0)
        kept = torch.arange(len(before)) != 3
        assert torch.equal(after[kept], before[kept])
        assert not torch.equal(before[kept], before[kept].to(BF16).to(F32))  # there are more bits
        train(module, stepper, range(3, 5), BF16)
        found.append([one.detach().clone() for one in module.parameters()])
    return found[0], found[1]


@pytest.mark.parametrize("how", ["1", "2"])
def test_masters_follow_weights_that_were_changed(pool: Pool, how: str) -> None:
    for early, late in pool.run(changed_between_steps, how):
        check_same(early, late)
