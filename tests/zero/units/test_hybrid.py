"""A mesh of two dimensions: replicas over the first, and shards over the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import dreamcomm
from dreamcomm import zero
from dreamcomm.zero import MixedPrecisionPolicy, ZeroOptimizer
from helpers.pool import Pool
from zero.units.sharding import made, my_batch, shard, weights, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

HOSTS = {"DREAMCOMM_HOSTS": "a,a,b,b"}
FORMS = pytest.mark.parametrize("gather", [False, True])
SHORT = [("tied", 1), ("strange", 3)]
Found = tuple[list[float], list[Tensor]]


def mesh_of(replicas: int = 2) -> DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))


def loss_of(module: nn.Module, number: int) -> Tensor:
    x, y = my_batch(number)
    return nn.functional.mse_loss(module(x), y)


def trained(module: Any, optimizer: Any, clips: Any, micro: int) -> Found:
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        for number in range(micro):
            loss = loss_of(module, step * micro + number) / micro
            if number < micro - 1:
                with clips.no_sync():
                    loss.backward()
            else:
                loss.backward()
        norms.append(float(clips.clip_grad_norm_(0.05)))
        optimizer.step()
    return norms, weights(module)


def beside_stage_2(name: str, gather: bool, micro: int) -> tuple[Found, Found]:
    kind, options = torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}
    alone = made(name)
    stage = ZeroOptimizer(alone.parameters(), kind, stage=2, **options)
    theirs = trained(alone, stage, stage, micro)
    module = shard(made(name), mesh=mesh_of(), gather=gather)
    for one in module.parameters():
        last = Replicate() if one.dim() == 0 else Shard(0)
        assert one.placements == (Replicate(), last)
    return theirs, trained(
        module, ZeroOptimizer(module.parameters(), kind, **options), module, micro
    )


CASES = [
    pytest.param(name, micro, marks=[] if (name, micro) in SHORT else pytest.mark.long)
    for name in ("mlp", "gpt", "tied", "strange", "odd")
    for micro in (1, 3)
]


@FORMS
@pytest.mark.parametrize(("name", "micro"), CASES)
def test_the_bits_are_those_of_stage_2_on_two_hosts(
    pool: Pool, name: str, micro: int, gather: bool
) -> None:
    for (norms, theirs), (own, ours) in pool.run(
        beside_stage_2, name, gather, micro, world=4, env=HOSTS
    ):
        assert norms == own
        assert all(map(torch.equal, theirs, ours))


def replicated_alone() -> tuple[Found, Found]:
    """Three replicas of one shard: data parallelism."""
    alone = dreamcomm.DistributedDataParallel(made("mlp"))
    theirs = trained(alone, torch.optim.SGD(alone.parameters(), lr=0.01, foreach=False), alone, 2)
    module = shard(made("mlp"), mesh=mesh_of(3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, foreach=False)
    return theirs, trained(module, optimizer, module, 2)


def test_replicas_of_one_shard_are_data_parallelism(pool: Pool) -> None:
    for (norms, theirs), (own, ours) in pool.run(replicated_alone, world=3):
        assert norms == own
        assert all(map(torch.equal, theirs, ours))


def other_replicas() -> list[Tensor]:
    """Replicas begin with other values, and one does not use a parameter."""
    module = made("mlp")
    rank = dist.get_rank()
    with torch.no_grad():
        for one in module.parameters():
            one.add_(rank // 2)
    module = shard(module, mesh=mesh_of())
    module.layers[0].bias.requires_grad_(rank != 3)
    loss_of(module, 0).backward()
    return [one.grad.to_local() for one in module.parameters()] + [
        one.to_local().detach() for one in module.parameters()
    ]


def test_replicas_have_the_first_ones_values_and_gradients(pool: Pool) -> None:
    found = pool.run(other_replicas, world=4)
    for one, other in ((0, 2), (1, 3)):
        assert all(map(torch.equal, found[one], found[other]))


def held_back(gather: bool, clears: bool) -> tuple[list[bool], list[bool]]:
    """Three passes of which the last alone sums over the replicas; and steps that end the sum."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how = {"mesh": mesh_of(), "gather": gather, "mp_policy": policy}
    module, other = shard(made("mlp"), **how), shard(made("mlp"), **how)
    if clears:
        module.set_requires_all_reduce(False)
        loss_of(module, 9).backward()
        module.zero_grad()
    for number in range(3):
        module.set_requires_all_reduce(number == 2)
        loss_of(module, number).backward()
        if number < 2:
            assert all(one.grad is None for one in module.parameters())
        with other.no_sync():
            loss_of(other, number).backward()
    other.reduce_gradients()
    close = [
        torch.allclose(whole(a.grad), whole(b.grad), rtol=1e-5, atol=1e-7)
        for a, b in zip(module.parameters(), other.parameters(), strict=True)
    ]
    module.zero_grad()
    module.set_requires_all_reduce(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss_of(module, 3).backward()
    optimizer.step()  # ends what was held back
    return close, [one.grad is not None for one in module.parameters()]


@FORMS
@pytest.mark.parametrize("clears", [False, True])
def test_sums_wait_for_the_other_replicas_in_float32(
    pool: Pool, gather: bool, clears: bool
) -> None:
    for close, stepped in pool.run(held_back, gather, clears, world=4):
        assert all(close)
        assert all(stepped)


def hooked(replicas: int, passes: int) -> tuple[list[bool], list[torch.Size]]:
    how = {} if replicas == 1 else {"mesh": mesh_of(replicas)}
    module, plain = shard(made("mlp"), **how), shard(made("mlp"), **how)
    seen = []

    def hook(flat: Tensor) -> None:
        seen.append(flat.shape)
        flat.mul_(2)

    module.layers[0].set_all_reduce_hook(hook)
    for number in range(passes):
        loss_of(module, number).backward()
        loss_of(plain, number).backward()
    first = {id(one) for one in module.layers[0].parameters()}
    equal = [
        torch.equal(whole(a.grad), whole(b.grad) * (2 if id(a) in first else 1))
        for a, b in zip(module.parameters(), plain.parameters(), strict=True)
    ]
    module.layers[0].set_all_reduce_hook(None)
    for each in (module, plain):
        each.zero_grad()
        loss_of(each, 7).backward()
    again = [
        torch.equal(whole(a.grad), whole(b.grad))
        for a, b in zip(module.parameters(), plain.parameters(), strict=True)
    ]
    return equal + again, seen


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_changes_the_flat_rows_of_its_unit(pool: Pool, replicas: int, passes: int) -> None:
    for equal, seen in pool.run(hooked, replicas, passes, world=4):
        assert all(equal)
        assert len(seen) == passes
        assert all(len(one) == 1 for one in seen)


def rewritten() -> tuple[bool, bool]:
    module = shard(made("mlp"), mesh=mesh_of())
    with module.rewrite() as writes:
        if writes:
            for number, one in enumerate(module.parameters()):
                one.fill_(number)
    right = all(bool((one == number).all()) for number, one in enumerate(weights(module)))
    zero.initialize(module, seed=3)
    return writes == (dist.get_rank() == 0), right


def test_the_first_rank_writes_for_all_replicas(pool: Pool) -> None:
    assert pool.run(rewritten, world=4) == [(True, True)] * 4


def saved(folder: str) -> tuple[list[bool], list[float]]:
    """A checkpoint of a hybrid mesh in other forms: equal weights, and the next step."""
    how: list[dict[str, Any]] = [{}, {"gather": True}, {"mesh": mesh_of()}]
    module = shard(made("tied"), mesh=mesh_of())
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
    trained(module, optimizer, module, 1)
    zero.save(state_of(module, optimizer), folder)
    others = []
    for options in how:
        other = shard(made("tied"), **options)
        stepper = ZeroOptimizer(other.parameters(), torch.optim.AdamW, lr=1e-3)
        state = state_of(other, stepper)
        zero.load(state, folder)
        set_state_dict(
            other, stepper, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        others.append((other, stepper))
    equal = [all(map(torch.equal, weights(module), weights(other))) for other, _ in others]
    for each, stepper in [(module, optimizer), *others]:
        stepper.zero_grad()
        loss_of(each, 9).backward()
        stepper.step()
    gaps = [
        max(
            float((a - b).abs().max()) for a, b in zip(weights(module), weights(other), strict=True)
        )
        for other, _ in others
    ]
    return equal, gaps


def state_of(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    model, state = get_state_dict(module, optimizer)
    return {"model": model, "optimizer": state}


def test_a_checkpoint_goes_into_other_forms(pool: Pool, tmp_path: Path) -> None:
    for equal, gaps in pool.run(saved, str(tmp_path / "saved"), world=4):
        assert all(equal)
        assert max(gaps) < 1e-7
        assert gaps[2] == 0
