"""A ZeroOptimizer's checkpoints go through other worlds, other stages and torch's optimizers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ddp.models import MODELS
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Fresh, Pool
from zero.checkpoints import (
    OPTIMIZERS,
    Bits,
    bits,
    build,
    check_same,
    load,
    put,
    save,
    state_of,
    train,
    whole,
)

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def begin(model: str, kind: str, how: str, folder: str) -> tuple[Bits, Any]:
    """Trains, saves and trains on: the state at the checkpoint, and what followed."""
    module, optimizer = build(model, kind, how)
    train(module, optimizer, range(3))
    save(module, optimizer, folder)
    saved = bits(module, optimizer)
    losses = train(module, optimizer, range(3, 5))
    return saved, (losses, bits(module, optimizer))


def resume(model: str, kind: str, how: str, folder: str, onward: str) -> tuple[Bits, Any]:
    """Loads, saves again, and trains on."""
    module, optimizer = build(model, kind, how)
    load(module, optimizer, folder)
    loaded = bits(module, optimizer)
    save(module, optimizer, onward)
    losses = train(module, optimizer, range(3, 5))
    return loaded, (losses, bits(module, optimizer))


def alone(_rank: int, *args: Any) -> tuple[Bits, Any]:
    return resume(*args)


SHORT = [("odd", "adamw"), ("cnn", "sgd")]


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param(*cell, marks=[] if cell in SHORT else [pytest.mark.long])
        for cell in itertools.product(MODELS, OPTIMIZERS)
    ],
)
def test_a_checkpoint_goes_through_worlds_and_optimizers(
    pool: Pool, fresh: Fresh, tmp_path: Path, model: str, kind: str
) -> None:
    folders = (str(tmp_path / f"{number}") for number in range(100))
    at = next(folders)
    (saved, onward), _ = pool.run(begin, model, kind, "2", at, world=2)
    # Each hop loads what the one before has saved.
    hops = [("wrapped 2", 2), ("1", 3), ("2", 1), ("alone", 0), ("2", 2), ("ddp", 2), ("1", 2)]
    for how, world in hops:
        after = next(folders)
        args = model, kind, how, at, after
        if world:
            found = pool.run(resume, *args, world=world)
        else:
            found = fresh.run(alone, *args, world=1, group=False)
        for loaded, further in found:
            check_same(loaded, saved)
            if world == 2:
                check_same(further[1], onward[1])
        if world == 2:
            check_same(found[0][1][0], onward[0])
        at = after


def names(folder: str, how: str, stepped: bool) -> list[str]:
    module, optimizer = build("odd", "adamw", how)
    if stepped:
        train(module, optimizer, range(1))
    save(module, optimizer, folder)
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return sorted(found)


def names_alone(_rank: int, *args: Any) -> list[str]:
    return names(*args)


def test_names_are_those_of_torch_before_a_first_step(
    pool: Pool, fresh: Fresh, tmp_path: Path
) -> None:
    expected = fresh.run(
        names_alone, str(tmp_path / "alone"), "alone", False, world=1, group=False
    )[0]
    assert "optimizer.state.unused.weight.exp_avg" in expected
    assert "optimizer.state.frozen.weight.exp_avg" not in expected
    for how in ("1", "2", "wrapped 1", "wrapped 2"):
        for stepped in (False, True):
            folder = str(tmp_path / f"{how} {stepped}")
            assert pool.run(names, folder, how, stepped) == [expected, expected]


def by_options(
    model: str, kind: str, how: str, options: dict[str, Any], first: bool
) -> tuple[Bits, Bits, Bits]:
    """The state at a checkpoint, and after further steps of the run and of a resumed one."""
    module, optimizer = build(model, kind, how)
    train(module, optimizer, range(0 if first else 3))
    saved = bits(module, optimizer)
    state = whole(state_of(module, optimizer, options=StateDictOptions(**options)))
    train(module, optimizer, range(3, 5))
    if options.get("broadcast_from_rank0") and dist.get_rank() > 0:
        state = {"model": {}, "optimizer": {}}
    if options.get("flatten_optimizer_state_dict"):
        options = {**options, "full_state_dict": False}  # torch cannot load with both
    other, stepper = build(model, kind, how)
    put(other, stepper, state, options=StateDictOptions(**options))
    check_same(bits(other, stepper), saved)
    train(other, stepper, range(3, 5))
    return saved, bits(module, optimizer), bits(other, stepper)


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {"full_state_dict": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "flat whole": {"flatten_optimizer_state_dict": True, "full_state_dict": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
    "sharded": {"cpu_offload": True},
}


@pytest.mark.parametrize("how", ["1", "wrapped 2"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model", ["odd", pytest.param("cnn", marks=pytest.mark.long)])
def test_options_of_state_dicts(pool: Pool, model: str, options: str, how: str) -> None:
    for first in (False, True):
        found = pool.run(by_options, model, "adamw", how, OPTIONS[options], first)
        for _, onward, resumed in found:
            check_same(onward, resumed)


def offloaded() -> list[dict[str, Any]]:
    module, optimizer = build("odd", "adamw", "2")
    train(module, optimizer, range(2))
    how = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(module, optimizer, options=how)
    return [whole(state), bits(module, optimizer)["optimizer"]]


def test_offloaded_whole_state_is_on_rank_0_alone(pool: Pool) -> None:
    (first, expected), (second, _) = pool.run(offloaded)
    for group in first["param_groups"]:
        group.pop("foreach")
    check_same(first, expected)
    assert second == {}


def saved_aside(folder: str) -> tuple[Bits, Bits]:
    module, optimizer = build("odd", "adamw", "wrapped 2")
    train(module, optimizer, range(3))
    saved = bits(module, optimizer)
    aside = dist.new_group()  # as the writing communicates beside the training
    state = state_of(module, optimizer)
    writing = dcp.async_save(state, checkpoint_id=folder, process_group=aside)
    train(module, optimizer, range(3, 5))  # the checkpoint holds a copy
    writing.result()
    module, optimizer = build("odd", "adamw", "1")
    load(module, optimizer, folder)
    return saved, bits(module, optimizer)


def test_async_save(pool: Pool, tmp_path: Path) -> None:
    for saved, loaded in pool.run(saved_aside, str(tmp_path / "point")):
        check_same(saved, loaded)


def look_and_train(looks: bool, kind: str, how: str) -> tuple[bool, Bits]:
    module, optimizer = build("odd", kind, how)
    before = [one.detach().clone() for one in module.parameters()]
    if looks and dist.get_rank() == 1:
        get_optimizer_state_dict(module, optimizer)
        assert len(optimizer.state) == 0
        for one in module.parameters():
            assert one.grad is None
            with pytest.raises(TypeError):
                optimizer.state[one]["other"] = 1
    same = all(torch.equal(p, q) for p, q in zip(before, module.parameters(), strict=True))
    train(module, optimizer, range(3))
    return same, bits(module, optimizer)


@pytest.mark.parametrize("how", ["1", "2", "wrapped 1", "wrapped 2"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_looking_at_the_state_before_a_first_step_changes_nothing(
    pool: Pool, kind: str, how: str
) -> None:
    expected = pool.run(look_and_train, False, kind, how)
    found = pool.run(look_and_train, True, kind, how)
    assert all(same for same, _ in found)
    check_same(list(found), list(expected))


def of_a_part(folder: str) -> list[bool]:
    """A group of the ranks 2 and 0, in this order of its own, with fewer rows than ranks."""
    group = dist.new_group([2, 0])
    found = []
    if dist.get_rank() != 1:
        module = torch.nn.Linear(3, 1)
        torch.nn.init.ones_(module.weight)
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, group)
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state = {"optimizer": get_optimizer_state_dict(module, optimizer)}
        dcp.save(state, checkpoint_id=folder, process_group=group)
        before = whole(state)
        for kept in state["optimizer"]["state"].values():
            kept["exp_avg"].to_local().zero_()  # type: ignore[index]
        dcp.load(state, checkpoint_id=folder, process_group=group)
        set_optimizer_state_dict(module, optimizer, state["optimizer"])
        check_same(before, whole({"optimizer": get_optimizer_state_dict(module, optimizer)}))
        found.append(True)
    dist.barrier()
    return found


def test_a_group_of_some_ranks(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(of_a_part, str(tmp_path / "point"), world=3) == [[True], [], [True]]


def from_other_layouts(model: str) -> None:
    module, optimizer = build(model, "adamw", "2")
    train(module, optimizer, range(2))
    before = bits(module, optimizer)
    mesh = init_device_mesh("cpu", (2, 2))
    layouts: list[tuple[Any, Any]] = [
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(1), Shard(0)),
    ]
    for layout in layouts:
        state = optimizer.state_dict()
        for kept in state["state"].values():
            for key, value in kept.items():
                if isinstance(value, DTensor):
                    placements = layout if value.dim() > 1 else (Shard(0), Replicate())
                    kept[key] = distribute_tensor(value.full_tensor(), mesh, placements)
                else:
                    kept[key] = value.clone()
        train(module, optimizer, range(2, 3))
        module.load_state_dict(before["model"])
        optimizer.load_state_dict(state)
        check_same(bits(module, optimizer), before)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_state_of_other_layouts(pool: Pool, model: str) -> None:
    pool.run(from_other_layouts, model, world=4)
