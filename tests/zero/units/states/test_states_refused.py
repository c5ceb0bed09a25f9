"""What scripts cannot do to sharded parameters: errors on all ranks, and the next step works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dreamcomm.zero import FSDPModule, ZeroOptimizer, fully_shard
from dreamcomm.zero.units.window import WindowError
from helpers.pool import Pool
from zero.checkpoints import build, check_same, train
from zero.units.sharding import made, shard, sharded, weights, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def other_data(rank: int) -> None:
    module, optimizer = build("gpt", "adamw", "3")
    train(module, optimizer, range(1))
    before = weights(module)
    parameter = module.position
    if rank in (dist.get_rank(), -1):
        parameter.data = torch.zeros_like(parameter)
    with pytest.raises(WindowError, match=r"rank [01]: parameter 'position' .* \.data = "):
        module(torch.ones(2, 12))
    assert module.position is parameter
    check_same(weights(module), before)
    other, stepper = build("gpt", "adamw", "3")
    train(other, stepper, range(2))
    train(module, optimizer, range(1, 2))
    check_same(weights(module), weights(other))


@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_other_data_is_refused(pool: Pool, rank: int) -> None:
    """Given by all ranks, or by one of them."""
    pool.run(other_data, rank)


def made_too_early() -> None:
    module = made("gpt")
    before = torch.optim.AdamW(module.parameters())
    shard(module)
    module(torch.ones(2, 12)).sum().backward()
    with pytest.raises(RuntimeError, match="made before fully_shard"):
        before.step()
    check_same(weights(module), [one.detach() for one in made("gpt").parameters()])
    module.zero_grad()
    train(module, ZeroOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3), range(2))
    other, stepper = build("gpt", "adamw", "3")
    train(other, stepper, range(2))
    check_same(weights(module), weights(other))


def test_an_optimizer_from_before(pool: Pool) -> None:
    pool.run(made_too_early)


def reduced_already(how: str) -> None:
    module, optimizer = build("gpt", "adamw", how)
    bare: Any = getattr(module, "module", module)
    with pytest.raises(ValueError, match=r"gradients of parameter .* are reduced already"):
        fully_shard(bare)
    train(module, optimizer, range(1))
    del module, optimizer
    shard(bare)
    train(bare, ZeroOptimizer(bare.parameters(), torch.optim.AdamW), range(1))


@pytest.mark.parametrize("how", ["1", "2", "ddp"])
def test_parameters_that_are_reduced_already(pool: Pool, how: str) -> None:
    pool.run(reduced_already, how)


def made_within_a_pass() -> None:
    module = sharded("gpt")
    loss = module(torch.ones(2, 12)).sum()
    with pytest.raises(ValueError, match=r"got the whole parameter 'position'"):
        ZeroOptimizer(module.parameters(), torch.optim.AdamW)
    torchs = torch.optim.AdamW(module.parameters())
    loss.backward()
    with pytest.raises(RuntimeError, match="or within a forward pass: it has the whole parameter"):
        torchs.step()
    module.zero_grad()
    train(module, ZeroOptimizer(module.parameters(), torch.optim.AdamW), range(1))


def test_an_optimizer_from_within_a_pass(pool: Pool) -> None:
    pool.run(made_within_a_pass)


def changed_on_one_rank(change: str) -> None:
    module, optimizer = build("gpt", "adamw", "3")
    train(module, optimizer, range(1))

    def apply() -> None:
        if change == "parameter":
            module.position = nn.Parameter(torch.ones(10, 96))
        else:
            module.blocks[1] = made("gpt").blocks[0]  # type: ignore[index]

    if dist.get_rank() == 1:
        apply()
    for _ in range(2):
        with pytest.raises(WindowError, match=r"list of changed parameters is .* on rank 0, and"):
            module(torch.ones(2, 12))
    if dist.get_rank() == 0:
        apply()
    train(module, ZeroOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3), range(1))
    if change == "parameter":
        assert isinstance(module.position, DTensor)


@pytest.mark.parametrize("change", ["parameter", "module"])
def test_a_change_on_one_rank(pool: Pool, change: str) -> None:
    pool.run(changed_on_one_rank, change)


def attributes_are_kept() -> None:
    module = made("gpt")
    module.position.tag = "before"  # type: ignore[union-attr]
    module.blocks[0].up.weight.sizes = [1, 2]  # type: ignore[index, union-attr]
    shard(module)
    module.position.more = "after"  # type: ignore[union-attr]

    def check(model: Any) -> None:
        for _ in range(2):
            assert isinstance(model.position, DTensor)
            assert (model.position.tag, model.position.more) == ("before", "after")  # type: ignore[attr-defined]
            assert model.blocks[0].up.weight.sizes == [1, 2]
            assert not hasattr(model.blocks[1].up.weight, "sizes")
            dtype = next(model.parameters()).dtype
            model(torch.ones(2, 12, dtype=dtype)).sum().backward()
            model.zero_grad()

    check(module)
    module.to(torch.float64)
    check(module)
    module.float()
    module.load_state_dict({key: value.clone() for key, value in module.state_dict().items()})
    check(module)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    module.to_empty(device="cpu")
    module.load_state_dict(state)
    check(module)
    module.load_state_dict(state, assign=True)
    with torch.no_grad():
        module(torch.ones(2, 12))
    check(module)


def test_attributes_are_kept(pool: Pool) -> None:
    pool.run(attributes_are_kept)


def ignored() -> None:
    module = made("gpt")
    position: Any = module.position
    shard(module, ignored_params={position})
    assert module.position is position
    module.to(torch.float64)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    state["position"] += 1 + dist.get_rank()
    module.load_state_dict(state, assign=True)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    train(module, optimizer, range(2), torch.float64)
    assert not isinstance(module.position, DTensor)
    assert isinstance(module.embedding.weight, DTensor)  # type: ignore[union-attr]
    everyone = [torch.empty_like(module.position) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, module.position.detach())  # type: ignore[operator]
    assert not torch.equal(everyone[0], everyone[1])  # each rank's own


def test_ignored_parameters_stay_ignored(pool: Pool) -> None:
    pool.run(ignored)


def before_the_next_pass() -> None:
    """New parameters are DTensors as soon as a script asks for them."""
    module = sharded("gpt")
    other = sharded("gpt")
    inner: Any = nn.Linear(96, 384)
    module.blocks[0].up = inner
    module.position = nn.Parameter(torch.ones(10, 96))
    plain = module.position
    seen = []
    plain.register_hook(lambda gradient: seen.append(gradient.shape))  # type: ignore[no-untyped-call]
    state = module.state_dict()
    assert all(isinstance(one, DTensor) for one in state.values())
    assert module.position is not plain
    position = module.position
    module.load_state_dict(other.state_dict())
    check_same(weights(module), weights(other))
    module(torch.ones(2, 12)).sum().backward()
    assert module.position is position
    assert seen == [(10, 96)]
    assert position.grad is not None
    check_same(whole(position), whole(other.position))


def test_states_between_a_change_and_the_next_pass(pool: Pool) -> None:
    pool.run(before_the_next_pass)


def of_a_part() -> None:
    """One unit's gradients are cleared, not its root's; those of ignored parameters are."""
    module = made("gpt")
    position: Any = module.position
    shard(module, ignored_params={position})
    block: Any = module.blocks[0]  # type: ignore[index]
    assert isinstance(block, FSDPModule)
    module(torch.ones(2, 12)).sum().backward()
    block.zero_grad()
    assert all(one.grad is None for one in block.parameters())
    assert position.grad is not None
    assert module.embedding.weight.grad is not None  # type: ignore[union-attr]
    module.zero_grad(set_to_none=False)
    left = [one.grad for one in module.parameters() if one.grad is not None]
    assert left
    assert not any(bool(whole(one).count_nonzero()) for one in left)
    module.zero_grad()
    assert all(one.grad is None for one in module.parameters())


def test_gradients_of_a_part_are_cleared(pool: Pool) -> None:
    pool.run(of_a_part)


def wrapped_again() -> None:
    module = sharded("gpt")
    for one in (module, module.blocks[0]):
        with pytest.raises(ValueError, match="sharded already"):
            fully_shard(one)
    module(torch.ones(2, 12)).sum().backward()


def test_wrapping_again(pool: Pool) -> None:
    pool.run(wrapped_again)
