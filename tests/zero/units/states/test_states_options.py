"""torch's functions for states and checkpoints, on fully sharded modules and their optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from dreamcomm import zero
from helpers.pool import Pool
from zero.checkpoints import Bits, bits, build, check_same, load, save, state_of, train, whole
from zero.units.sharding import made

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

HOWS = ["3", "torch 3"]
WHOLE = {"full_state_dict": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "offloaded": {"cpu_offload": True},
    "whole": WHOLE,
    "flat": {"flatten_optimizer_state_dict": True},
    "flat whole": {"flatten_optimizer_state_dict": True, **WHOLE},
    "broadcast": {**WHOLE, "broadcast_from_rank0": True},
    "offloaded broadcast": {**WHOLE, "broadcast_from_rank0": True, "cpu_offload": True},
}


def by_options(model: str, how: str, options: dict[str, Any], first: bool) -> None:
    """A resumed run goes on as the one that was saved."""
    module, optimizer = build(model, "adamw", how)
    train(module, optimizer, range(0 if first else 3))
    saved = steady(module, optimizer)
    state = state_of(module, optimizer, options=StateDictOptions(**options))
    if options.get("full_state_dict"):
        check_whole(model, state, options)
    state = copied(state)
    train(module, optimizer, range(3, 6))
    if options.get("broadcast_from_rank0") and dist.get_rank() > 0:
        state = {"model": {}, "optimizer": {}}
    other, stepper = build(model, "adamw", how)
    set_model_state_dict(other, state["model"], options=StateDictOptions(**options))
    if options.get("flatten_optimizer_state_dict"):
        options = {**options, "full_state_dict": False}  # torch cannot load with both
    moments = StateDictOptions(**options)
    set_optimizer_state_dict(other, stepper, state["optimizer"], options=moments)
    check_same(steady(other, stepper), saved)
    train(other, stepper, range(3, 6))
    check_same(steady(other, stepper), steady(module, optimizer))


def steady(module: nn.Module, optimizer: torch.optim.Optimizer) -> Bits:
    """Without options, which torch's own load may change from tuples into lists."""
    found = bits(module, optimizer)
    if not isinstance(optimizer, zero.ZeroOptimizer):
        del found["optimizer"]["param_groups"]
    return found


def check_whole(model: str, state: dict[str, Any], options: dict[str, Any]) -> None:
    if options.get("cpu_offload") and dist.get_rank() > 0:
        assert state == {"model": {}, "optimizer": {}}
        return
    expected = made(model).state_dict()
    assert {key: value.shape for key, value in state["model"].items()} == {
        key: value.shape for key, value in expected.items()
    }
    assert not any(isinstance(value, DTensor) for value in state["model"].values())


def copied(value: Any) -> Any:
    """Without communication."""
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, list):
        return [copied(part) for part in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_states(pool: Pool, options: str) -> None:
    for first in (False, True):
        pool.run(by_options, "odd", "3", OPTIONS[options], first)


# Whole moments in a flat state are no DTensors, so torch's optimizer cannot step them.
@pytest.mark.parametrize(
    "options",
    [
        "broadcast",
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in OPTIONS
            if one not in ("broadcast", "flat whole")
        ),
    ],
)
def test_options_of_states_with_torchs_optimizer(pool: Pool, options: str) -> None:
    pool.run(by_options, "gpt", "torch 3", OPTIONS[options], False)


def strict_or_not() -> None:
    module, _ = build("odd", "sgd", "3")
    state = get_model_state_dict(module)
    lacking = {key: value for key, value in state.items() if key != "out.weight"}
    before = whole(state)
    with pytest.raises(RuntimeError, match=r'Missing key.*"out\.weight"'):
        set_model_state_dict(module, lacking)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        set_model_state_dict(module, {**state, "other": torch.ones(1)})
    loose = StateDictOptions(strict=False)
    found = set_model_state_dict(module, {**lacking, "other": torch.ones(1)}, options=loose)
    assert (found.missing_keys, found.unexpected_keys) == (["out.weight"], ["other"])
    check_same(whole(get_model_state_dict(module)), before)
    with pytest.raises(RuntimeError, match="size mismatch for"):
        module.load_state_dict({**state, "out.weight": state["into.weight"]})
    module(torch.ones(2, 12)).sum().backward()  # all ranks go on


def test_strict_or_not(pool: Pool) -> None:
    pool.run(strict_or_not)


def one_optimizer_into_the_other(how: str, onward: str) -> tuple[Bits, Bits]:
    module, optimizer = build("gpt", "adamw", how)
    train(module, optimizer, range(3))
    state = copied(get_optimizer_state_dict(module, optimizer))
    weights = copied(get_model_state_dict(module))
    train(module, optimizer, range(3, 6))
    other, stepper = build("gpt", "adamw", onward)
    set_model_state_dict(other, weights)
    set_optimizer_state_dict(other, stepper, state)
    train(other, stepper, range(3, 6))
    return bits(module, optimizer), bits(other, stepper)


@pytest.mark.parametrize(("how", "onward"), [("3", "torch 3"), ("torch 3", "3")])
def test_one_optimizer_goes_on_where_the_other_was(pool: Pool, how: str, onward: str) -> None:
    for expected, found in pool.run(one_optimizer_into_the_other, how, onward):
        check_same(found, expected)


def by_torchs_checkpoint(folder: str, how: str) -> None:
    module, optimizer = build("tied", "adamw", how)
    train(module, optimizer, range(3))
    save(module, optimizer, folder)
    saved = bits(module, optimizer)
    train(module, optimizer, range(3, 6))
    onward = bits(module, optimizer)
    load(module, optimizer, folder)  # into one that has been trained on
    check_same(bits(module, optimizer), saved)
    train(module, optimizer, range(3, 6))
    check_same(bits(module, optimizer), onward)
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert "model.embedding.weight" in found
    assert "optimizer.state.embedding.weight.exp_avg" in found


@pytest.mark.parametrize("how", HOWS)
def test_torchs_checkpoints(pool: Pool, tmp_path: Path, how: str) -> None:
    pool.run(by_torchs_checkpoint, str(tmp_path / "point"), how, world=3)


def saved_aside(folder: str, how: str) -> None:
    module, optimizer = build("gpt", "adamw", how)
    train(module, optimizer, range(3))
    saved = bits(module, optimizer)
    aside = dist.new_group()  # as the writing communicates beside the training
    writing = dcp.async_save(state_of(module, optimizer), checkpoint_id=folder, process_group=aside)
    train(module, optimizer, range(3, 9))
    writing.result()
    module, optimizer = build("gpt", "adamw", how)
    load(module, optimizer, folder)
    check_same(bits(module, optimizer), saved)


@pytest.mark.parametrize("how", HOWS)
def test_async_saves_have_the_values_of_the_call(pool: Pool, tmp_path: Path, how: str) -> None:
    pool.run(saved_aside, str(tmp_path / "point"), how)


def weights_alone(folder: str) -> None:
    """The state itself is read into: no copy, and no set_model_state_dict."""
    module, optimizer = build("gpt", "adamw", "3")
    train(module, optimizer, range(2))
    state = {"model": module.state_dict()}
    zero.save(state, folder)
    before = whole(state)
    x = torch.ones(2, 12)
    train(module, optimizer, range(2, 4))
    graph = module(x).sum()
    graph.backward(retain_graph=True)
    zero.load({"model": module.state_dict()}, folder)
    check_same(whole({"model": module.state_dict()}), before)
    expected = made("gpt")
    expected.load_state_dict(before["model"])
    assert torch.equal(module(x), expected(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def while_others_read(folder: str) -> None:
    module, optimizer = build("gpt", "adamw", "3")
    state = {"model": module.state_dict()}
    zero.save(state, folder)
    module(torch.ones(2, 12))  # with gradients: ranks go on reading
    zero.load(state, folder)
    with pytest.raises(zero.units.window.WindowError, match=r"have|has written to '.*weight'"):
        train(module, optimizer, range(1))
    train(module, optimizer, range(1))


def test_a_load_while_others_read(pool: Pool, tmp_path: Path) -> None:
    pool.run(while_others_read, str(tmp_path / "point"))


def test_a_load_in_place_is_seen(pool: Pool, tmp_path: Path) -> None:
    pool.run(weights_alone, str(tmp_path / "point"))
