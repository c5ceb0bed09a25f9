"""Changes that a script makes to gradients whose sums are of another type than it sees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.beside_one import said
from zero.units.sharding import made, my_batch, shard, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

SUMS = MixedPrecisionPolicy(reduce_dtype=torch.float32)


def zeroed_by(module: Any, optimizer: Any) -> dict[str, Callable[[], object]]:
    """Ways to zero gradients in place: some count up no version."""
    grads: list[Any] = [one.grad for one in module.parameters()]
    return {
        "optimizer": lambda: optimizer.zero_grad(set_to_none=False),
        "module": lambda: module.zero_grad(set_to_none=False),
        "each": lambda: [one.zero_() for one in grads],
        "foreach": lambda: torch._foreach_mul_(grads, 0.0),
        "local": lambda: [one.to_local().mul_(0) for one in grads],
        "data": lambda: [one.to_local().data.mul_(0) for one in grads],
        "clip": lambda: torch.nn.utils.clip_grad_norm_(module.parameters(), 0.0),
    }


def changed(held_back: bool) -> list[str]:
    """The ways whose next gradient is not that of the second batch alone."""
    wrong = []
    for how in ("optimizer", "module", "each", "foreach", "local", "data", "clip"):
        if held_back and how == "clip":
            continue  # a part of each rank has no norm
        module = shard(made("mlp").to(torch.bfloat16), mp_policy=SUMS)
        other = shard(made("mlp").to(torch.bfloat16), mp_policy=SUMS)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with module.no_sync() if held_back else contextlib.nullcontext():
            loss_of(module, 0).backward()
        zeroed_by(module, optimizer)[how]()
        loss_of(module, 1).backward()
        loss_of(other, 1).backward()
        pairs = zip(module.parameters(), other.parameters(), strict=True)
        if not all(torch.equal(whole(a.grad), whole(b.grad)) for a, b in pairs):
            wrong.append(how)
    return wrong


def loss_of(module: nn.Module, number: int) -> Tensor:
    return loss_in(torch.bfloat16, module, number)


def loss_in(dtype: torch.dtype, module: nn.Module, number: int) -> Tensor:
    x, y = my_batch(number)
    return nn.functional.mse_loss(module(x.to(dtype)).float(), y)


@pytest.mark.parametrize("held_back", [False, True])
def test_the_next_pass_adds_to_what_the_script_has_left(pool: Pool, held_back: bool) -> None:
    assert pool.run(changed, held_back, world=2) == [[], []]


def zeroed_with_what_is_hidden(form: str) -> bool:
    """A reduced gradient is zeroed in place while the module has sums of a later pass."""
    how: dict[str, Any] = {}
    dtype = torch.bfloat16 if form == "cast" else torch.float32
    if form == "cast":
        how["mp_policy"] = SUMS
    elif form == "hybrid":
        how["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    module, other = (shard(made("mlp").to(dtype), **how) for _ in range(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss_in(dtype, module, 0).backward()
    with module.no_sync():
        loss_in(dtype, module, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    for each in (module, other):
        loss_in(dtype, each, 1).backward()
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    return all(torch.equal(whole(a.grad), whole(b.grad)) for a, b in pairs)


@pytest.mark.parametrize("form", ["plain", "cast", "hybrid"])
def test_zeros_clear_a_sum_that_is_hidden(pool: Pool, form: str) -> None:
    assert pool.run(zeroed_with_what_is_hidden, form, world=2) == [True] * 2


def inference_first(gather: bool) -> bool:
    module = shard(made("mlp"), gather=gather)
    x, y = my_batch(0)
    with torch.inference_mode():
        module(x)
    nn.functional.mse_loss(module(x), y).backward()
    return all(one.grad is not None for one in module.parameters())


@pytest.mark.parametrize("gather", [False, True])
def test_a_first_pass_may_be_in_inference_mode(pool: Pool, gather: bool) -> None:
    assert pool.run(inference_first, gather, world=2) == [True] * 2


def tied() -> str:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    fully_shard(module[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return said(lambda: fully_shard(module[1]))


def test_a_tied_parameter_has_one_type(pool: Pool) -> None:
    for text in pool.run(tied, world=2):
        assert "parameter 'weight' of a Linear is tied to one of a unit that computes in " in text
        assert "torch.bfloat16, and this unit's policy has param_dtype=None" in text
