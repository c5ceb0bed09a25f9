"""States of fully sharded modules: this rank's rows, in files, copies and loads."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from zero.checkpoints import build, check_same, train
from zero.units.sharding import made, sharded, weights, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def rows_of_state(name: str) -> None:
    module = sharded(name)
    original = made(name).state_dict()
    state = module.state_dict()
    assert list(state) == list(original)
    for key, value in state.items():
        if value.dim() == 0 or not isinstance(value, DTensor):
            continue
        mine = original[key].chunk(dist.get_world_size())
        expected = mine[dist.get_rank()] if dist.get_rank() < len(mine) else original[key][:0]
        local = value.to_local()
        assert value.placements == (Shard(0),)
        assert torch.equal(local, expected)
        assert value.shape == original[key].shape
        assert local.untyped_storage().nbytes() == local.nbytes
        assert local.storage_offset() == 0
    for one, value in module.named_parameters():
        assert (
            state[one].to_local().data_ptr() == value.to_local().data_ptr()
        )  # as in torch, the state is no copy


@pytest.mark.parametrize("name", ["gpt", "tied", "batchnorm", "strange"])
def test_a_state_has_this_ranks_rows(pool: Pool, name: str) -> None:
    pool.run(rows_of_state, name, world=3)


def state_within_a_pass() -> None:
    module, optimizer = build("mlp", "adamw", "3")
    x = torch.ones(2, 12)
    for _ in range(2):
        loss = module(x).sum()  # the root's plain parameters are registered now
        assert all(isinstance(one, DTensor) for one in module.state_dict().values())
        loss.backward()
        assert all(isinstance(one, DTensor) for one in module.state_dict().values())
        optimizer.step()
        optimizer.zero_grad()


def test_a_state_within_a_pass(pool: Pool) -> None:
    pool.run(state_within_a_pass)


def in_files(folder: str) -> None:
    module = sharded("gpt")
    rank, world = dist.get_rank(), dist.get_world_size()
    path = Path(folder) / f"{rank}.pt"
    numel = sum(one.numel() for one in made("gpt").parameters())
    torch.save(module.state_dict(), path)
    assert 4 * numel / world < path.stat().st_size < 4 * numel / world + 30_000
    loaded = torch.load(path)
    for key, value in module.state_dict().items():
        assert torch.equal(loaded[key].to_local(), value.to_local())
        assert loaded[key].to_local().data_ptr() != value.to_local().data_ptr()
    one = module.blocks[0].up.weight
    torch.save(one, path)
    assert path.stat().st_size < one.to_local().nbytes + 5_000
    again = torch.load(path)
    assert isinstance(again, nn.Parameter)
    assert torch.equal(again.to_local(), one.to_local())
    assert torch.equal(whole(again), whole(one))
    torch.save(one.to_local(), path)
    assert path.stat().st_size < one.to_local().nbytes + 5_000
    with torch.no_grad():
        for value in module.parameters():
            value.zero_()
    module.load_state_dict(loaded)
    expected = made("gpt").parameters()
    for value, before in zip(weights(module), expected, strict=True):
        assert torch.equal(value, before)


@pytest.mark.parametrize("world", [2, 3])
def test_files_have_this_ranks_rows_alone(pool: Pool, tmp_path: Path, world: int) -> None:
    pool.run(in_files, str(tmp_path), world=world)


def of_another_rank(folder: str) -> None:
    module = sharded("gpt")
    path = Path(folder) / "rank0.pt"
    if dist.get_rank() == 0:
        torch.save(module.state_dict(), path)
    dist.barrier()
    before = weights(module)
    state = torch.load(path)
    for assign in (False, True):
        if dist.get_rank() == 0:
            module.load_state_dict(state, assign=assign)
        else:
            with pytest.raises(ValueError, match=r"rank 1: .* this rank's rows .* of rank 0"):
                module.load_state_dict(state, assign=assign)
            module.load_state_dict(copy.deepcopy(module.state_dict()), assign=assign)
    check_same(weights(module), before)
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW)
    train(module, optimizer, range(1))


def test_rows_of_another_rank_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(of_another_rank, str(tmp_path))


def copies() -> None:
    module, optimizer = build("gpt", "adamw", "3")
    train(module, optimizer, range(1))
    one = module.blocks[0].up.weight
    other = copy.deepcopy(one)
    state = copy.deepcopy(module.state_dict())
    assert isinstance(other, nn.Parameter)
    assert isinstance(other, DTensor)
    assert other.to_local().untyped_storage().nbytes() == one.to_local().nbytes
    before = [whole(value) for value in module.state_dict().values()]
    train(module, optimizer, range(1, 3))
    changed = [whole(value) for value in module.state_dict().values()]
    for kept, value, after in zip(state.values(), before, changed, strict=True):
        assert torch.equal(whole(kept), value)
        assert not torch.equal(after, value)
    assert torch.equal(whole(other), before[list(state).index("blocks.0.up.weight")])
    with torch.no_grad():
        other.fill_(7)  # no row of the module's
    check_same([whole(value) for value in module.state_dict().values()], changed)
    module.load_state_dict(state)
    check_same([whole(value) for value in module.state_dict().values()], before)
    averages = {name: p.detach().clone() for name, p in module.named_parameters()}
    train(module, optimizer, range(3, 4))
    for name, p in module.named_parameters():
        averages[name].lerp_(p.detach(), 0.5)
    module.load_state_dict(averages)
    for name, p in module.named_parameters():
        assert torch.equal(p.to_local(), averages[name].to_local())


def test_copies_have_memory_of_their_own(pool: Pool) -> None:
    pool.run(copies)


def no_copies_of_modules() -> None:
    module = sharded("mlp")
    for one in (module, module.layers[0], nn.Sequential(module)):
        with pytest.raises(RuntimeError, match="cannot be copied"):
            copy.deepcopy(one)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        torch.optim.swa_utils.AveragedModel(module)
    module(torch.ones(2, 12)).sum().backward()


def test_modules_are_not_copied(pool: Pool) -> None:
    pool.run(no_copies_of_modules)


def whole_tensors_are_loaded() -> None:
    module = sharded("gpt")
    state = made("gpt").state_dict()
    with pytest.raises(RuntimeError, match="DTensor"):
        module.load_state_dict(state)
    for value, expected in zip(weights(module), made("gpt").parameters(), strict=True):
        assert torch.equal(value, expected)
    with module.rewrite() as writes:
        if writes:
            module.load_state_dict({key: value + 1 for key, value in state.items()})
    for value, expected in zip(weights(module), made("gpt").parameters(), strict=True):
        assert torch.equal(value, expected.detach() + 1)


def test_whole_tensors_go_in_by_rewrite(pool: Pool) -> None:
    pool.run(whole_tensors_are_loaded)
