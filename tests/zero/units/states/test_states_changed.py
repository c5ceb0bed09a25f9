"""Scripts change the parameters of fully sharded modules; the next pass follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dreamcomm import zero
from dreamcomm.zero import ZeroOptimizer, fully_shard
from helpers.pool import Pool
from zero.checkpoints import build, check_same, train
from zero.units.sharding import TiedGpt, made, shard, weights, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

Change = Callable[[Any], None]
DOUBLE = {"to", "double"}


def new(*shape: int) -> nn.Parameter:
    """The same on all ranks."""
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(3)) / 8)


def linear(into: int, out: int) -> nn.Linear:
    made = nn.Linear(into, out)
    made.weight, made.bias = new(out, into), new(out)
    return made


def tie(gpt: Any) -> None:
    gpt.head.weight = gpt.embedding.weight


def untie(gpt: Any) -> None:
    gpt.head.weight = nn.Parameter(whole(gpt.head.weight) + 1)


def double(gpt: Any) -> None:
    gpt.double()


def to(gpt: Any) -> None:
    gpt.to(dtype=torch.float64)


def to_the_same(gpt: Any) -> None:
    gpt.to("cpu").float()


def replace_a_parameter(gpt: Any) -> None:
    gpt.blocks[0].up.weight = new(384, 96)


def enlarge(gpt: Any) -> None:
    gpt.embedding.weight = new(47, 96)
    gpt.head = linear(96, 47)


def replace_in_a_unit(gpt: Any) -> None:
    gpt.blocks[1].up = linear(96, 384)


def replace_a_unit(gpt: Any) -> None:
    torch.manual_seed(3)
    gpt.blocks[1] = made("tied").blocks[0]  # type: ignore[index]


def replace_by_a_unit(gpt: Any) -> None:
    gpt.head = linear(96, 40)
    if isinstance(gpt, zero.FSDPModule):
        fully_shard(gpt.head)


def add(gpt: Any) -> None:
    gpt.blocks.append(linear(96, 96))


def leave_out(gpt: Any) -> None:
    gpt.blocks[0].up.bias = None
    gpt.blocks[0].norm.bias = None
    del gpt.blocks[1]


def freeze(gpt: Any) -> None:
    gpt.blocks[0].requires_grad_(False)
    gpt.head.requires_grad_(False)


def empty_and_load(gpt: Any) -> None:
    state = {key: value.detach().clone() for key, value in gpt.state_dict().items()}
    gpt.to_empty(device="cpu")
    gpt.load_state_dict(state)


def assign(gpt: Any) -> None:
    state = {key: value.detach().clone() + 1 for key, value in gpt.state_dict().items()}
    gpt.load_state_dict(state, assign=True)


def assign_whole(gpt: Any) -> None:
    state = {key: whole(value) + 1 for key, value in gpt.state_dict().items()}
    gpt.load_state_dict(state, assign=True)


CHANGES: dict[str, Change] = {
    one.__name__: one
    for one in (
        tie,
        untie,
        double,
        to,
        to_the_same,
        replace_a_parameter,
        enlarge,
        replace_in_a_unit,
        replace_a_unit,
        replace_by_a_unit,
        add,
        leave_out,
        freeze,
        empty_and_load,
        assign,
        assign_whole,
    )
}


def gpt_of(change: str) -> TiedGpt:
    gpt = made("tied")
    assert isinstance(gpt, TiedGpt)
    if change != "untie":
        gpt.head.weight = nn.Parameter(gpt.head.weight + 1)
    return gpt


def train_on(module: nn.Module, change: str, torchs: bool) -> list[Any]:
    """Losses and weights of three steps with a new optimizer."""
    dtype = torch.float64 if change in DOUBLE else torch.float32
    stepper: torch.optim.Optimizer
    if torchs or change == "replace_by_a_unit":  # which makes two trees
        stepper = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)
    else:
        stepper = ZeroOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
    losses = train(module, stepper, range(2, 5), dtype)
    return [losses, dict(zip(names(module), weights(module), strict=True))]


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def changed_between_steps(change: str, when: str) -> None:
    """As if the module had been changed before it was wrapped."""
    module = shard(gpt_of(change), reshard_after_forward=False if when == "kept" else None)
    train(module, ZeroOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3), range(2))
    other = gpt_of(change)
    for one, value in zip(other.parameters(), weights(module), strict=True):
        one.data.copy_(value)
    with torch.set_grad_enabled(when == "open"):
        module(torch.ones(2, 12))
    CHANGES[change](module)
    CHANGES[change](other)
    module.reshard()  # else whole parameters are registered
    found = train_on(module, change, when == "open")
    expected = train_on(shard(other), change, False)
    check_same(found, expected)
    assert all(isinstance(one, DTensor) for one in module.parameters())
    assert (module.head.weight is module.embedding.weight) is (change == "tie")


@pytest.mark.parametrize("when", ["closed", "open", pytest.param("kept", marks=pytest.mark.long)])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_steps(pool: Pool, change: str, when: str) -> None:
    """Where ranks write, where they read, and where they read on after an evaluation."""
    pool.run(changed_between_steps, change, when)


def frozen_for_a_time(when: str) -> None:
    """One optimizer has all parameters throughout."""
    found = []
    for how in ("3", "ddp"):
        module: Any
        module, optimizer = build("gpt", "adamw", how)
        inner = getattr(module, "module", module)
        losses = train(module, optimizer, range(2))
        for number, trains in enumerate((False, True), 1):
            if when == "open":
                module(torch.ones(2, 12))  # the root's whole parameters are registered
            for part in (inner.position, inner.blocks[0]):
                part.requires_grad_(trains)
            losses += train(module, optimizer, range(2 * number, 2 * number + 2))
        found.append([losses, weights(inner)])
    check_same(*found)


@pytest.mark.parametrize("when", ["closed", "open"])
def test_parameters_are_frozen_for_a_time(pool: Pool, when: str) -> None:
    pool.run(frozen_for_a_time, when)
