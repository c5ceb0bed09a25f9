"""The state of a ZeroOptimizer on fully sharded parameters."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from zero.checkpoints import bits, build, check_same, train, whole
from zero.units.sharding import made, shard, sharded, weights

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

AdamW = torch.optim.AdamW
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 1e-3, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3}),
}


def rows_alone() -> None:
    module, optimizer = build("strange", "adamw", "3")
    train(module, optimizer, range(2))
    state = optimizer.state_dict()
    named = dict(enumerate(module.named_parameters()))
    for number, kept in state["state"].items():
        name, parameter = named[number]
        for part in ("exp_avg", "exp_avg_sq"):
            value = kept[part]
            if parameter.dim() == 0:
                assert not isinstance(value, DTensor), name
                continue
            assert value.placements == (Shard(0),), name
            assert value.shape == parameter.shape, name
            local = value.to_local()
            assert local.shape == parameter.to_local().shape, name  # type: ignore[operator]
            assert local.untyped_storage().nbytes() == local.nbytes, name
        assert float(kept["step"]) == (0 if "unused" in name else 2), name
    file = io.BytesIO()
    torch.save(state, file)
    own = sum(one.to_local().nbytes for one in optimizer.param_groups[0]["params"])
    assert file.tell() < 2 * own + 40_000


@pytest.mark.parametrize("world", [2, 3])
def test_a_state_has_this_ranks_rows(pool: Pool, world: int) -> None:
    pool.run(rows_alone, world=world)


def of_another_rank() -> None:
    module, optimizer = build("gpt", "adamw", "3")
    train(module, optimizer, range(2))
    before = bits(module, optimizer)
    state = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"expected this rank's part of 'exp_avg'.*rank 0"):
            optimizer.load_state_dict(state[0])  # type: ignore[arg-type]
    check_same(bits(module, optimizer), before)
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copy.deepcopy(optimizer)


def test_anothers_rows_are_refused(pool: Pool) -> None:
    pool.run(of_another_rank)


def loaded_on_one_rank() -> None:
    module, optimizer = build("gpt", "adamw", "3")
    train(module, optimizer, range(1))
    if dist.get_rank() == 1:
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"different options.* states on some ranks alone"):
        train(module, optimizer, range(1, 3))


def test_a_load_on_one_rank(pool: Pool) -> None:
    pool.run(loaded_on_one_rank)


def consolidated(kind: str) -> None:
    """All of it goes into torch's optimizer of one process, and back."""
    cls, options = KINDS[kind]
    module = sharded("gpt")
    optimizer = ZeroOptimizer(module.parameters(), cls, **options)
    train(module, optimizer, range(2))
    everything = whole({"optimizer": optimizer.state_dict()})["optimizer"]
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="consolidated on rank 1"):
            optimizer.state_dict()
    state = [optimizer.state_dict() if dist.get_rank() == 1 else None]
    if state[0] is not None:
        check_same(whole(state[0]["state"]), everything["state"])
    dist.broadcast_object_list(state, src=1)
    values = weights(module)
    alone = made("gpt")
    with torch.no_grad():
        for one, value in zip(alone.parameters(), values, strict=True):
            one.copy_(value)
    torchs = cls(alone.parameters(), **options, foreach=False)
    torchs.load_state_dict(state[0])  # type: ignore[arg-type]
    other = shard(copy.deepcopy(alone))
    stepper = ZeroOptimizer(other.parameters(), cls, **options)
    stepper.load_state_dict(torchs.state_dict())
    train(module, optimizer, range(2, 4))
    assert isinstance(next(iter(optimizer.state_dict()["state"].values())), dict)  # no copy of all
    train(other, stepper, range(2, 4))
    check_same(bits(other, stepper), bits(module, optimizer))


@pytest.mark.parametrize("kind", KINDS)
def test_consolidated_states(pool: Pool, kind: str) -> None:
    pool.run(consolidated, kind, world=3)


def as_a_mapping() -> None:
    module, optimizer = build("gpt", "sgd", "3")
    other, torchs = build("gpt", "sgd", "torch 3")
    pairs = list(zip(module.parameters(), other.parameters(), strict=True))
    position, theirs = module.position, other.position
    assert len(optimizer.state) == 0
    assert position not in optimizer.state
    train(module, optimizer, range(2))
    train(other, torchs, range(2))
    assert set(optimizer.state) == {one for one, _ in pairs}
    for one, counterpart in pairs:
        kept = optimizer.state[one]["momentum_buffer"]
        expected = torchs.state[counterpart]["momentum_buffer"].to_local()
        assert torch.equal(kept, expected)
    optimizer.state[position]["momentum_buffer"].zero_()  # type: ignore[index]
    torchs.state[theirs]["momentum_buffer"].zero_()  # type: ignore[index]
    optimizer.state.pop(module.embedding.weight)  # type: ignore[union-attr, arg-type]
    torchs.state.pop(other.embedding.weight)  # type: ignore[union-attr, arg-type]
    whole_one: Tensor = torch.ones(10, 96)
    optimizer.state[position] = {"momentum_buffer": whole_one}  # type: ignore[index]
    torchs.state[theirs]["momentum_buffer"].fill_(1)  # type: ignore[index]
    train(module, optimizer, range(2, 4))
    train(other, torchs, range(2, 4))
    check_same(weights(module), weights(other))
    optimizer.state = defaultdict(dict)
    torchs.state = defaultdict(dict)
    train(module, optimizer, range(4, 6))
    train(other, torchs, range(4, 6))
    check_same(weights(module), weights(other))


def test_the_state_as_a_mapping(pool: Pool) -> None:
    pool.run(as_a_mapping)


def added_groups() -> None:
    found = []
    for how in ("3", "torch 3"):
        module = sharded("gpt")
        first = [module.position, *module.embedding.parameters()]
        rest = list(module.blocks.parameters())
        optimizer: torch.optim.Optimizer
        if how == "3":
            optimizer = ZeroOptimizer(first, AdamW, lr=1e-3)
        else:
            optimizer = AdamW(first, lr=1e-3, foreach=False)
        train(module, optimizer, range(2))
        if how == "3":
            with pytest.raises(RuntimeError, match="call zero_grad"):
                optimizer.add_param_group({"params": rest})
        optimizer.zero_grad()
        optimizer.add_param_group({"params": rest, "lr": 1e-2})
        optimizer.param_groups[0]["lr"] = 1e-4
        module.zero_grad()
        train(module, optimizer, range(2, 5))
        found.append(weights(module))
        if how == "3":
            optimizer.param_groups[0]["params"].pop()
            with pytest.raises(RuntimeError, match=r"param_groups\[0\]"):
                train(module, optimizer, range(5, 6))
    check_same(*found)


def test_groups_are_added(pool: Pool) -> None:
    pool.run(added_groups)


def moved() -> None:
    module, optimizer = build("gpt", "adamw", "3")
    train(module, optimizer, range(1))
    module.double()
    with pytest.raises(RuntimeError, match="make the optimizer after"):
        train(module, optimizer, range(1, 2), torch.float64)
    module.zero_grad()
    train(module, ZeroOptimizer(module.parameters(), AdamW), range(1, 3), torch.float64)


def test_an_optimizer_from_before_a_move(pool: Pool) -> None:
    pool.run(moved)


def of_two_modules() -> None:
    one, other = sharded("gpt"), sharded("mlp")
    plain = made("mlp")
    with pytest.raises(ValueError, match="of one module after fully_shard, got some of 2 modules"):
        ZeroOptimizer([*one.parameters(), *other.parameters()], AdamW)
    with pytest.raises(ValueError, match="got some of 1 modules and others"):
        ZeroOptimizer([*one.parameters(), *plain.parameters()], AdamW)
    with pytest.raises(ValueError, match="stage 3 shards the parameters, too"):
        ZeroOptimizer(plain.parameters(), AdamW, stage=3)
    steppers = [ZeroOptimizer(module.parameters(), AdamW) for module in (one, other)]
    x = torch.ones(2, 12)
    (one(x) + other(x)).sum().backward()
    for stepper in steppers:
        stepper.step()


def test_parameters_of_two_modules(pool: Pool) -> None:
    pool.run(of_two_modules)
