"""torch's PowerSGD hook on dreamcomm: the bits of Gloo, several buckets, checkpoints, bytes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import dreamcomm
from ddp.reference import Crossed
from helpers.pool import Pool
from training.models import Mlp, batch, loss_of, shard

STEPS, START = 24, 2  # the first steps send all, while torch's class makes its buckets again
# Gloo's groups of a rank: a thread of Gloo would abort if the hook's callback held the last
# reference to its group.
_kept: list[Any] = []


def state_of(group: Any) -> PowerSGDState:
    return PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=START, min_compression_rate=1
    )


def wrapped(module: nn.Module, state: PowerSGDState, ours: bool, cap: float = 25) -> Any:
    kind: Any = dreamcomm.DistributedDataParallel if ours else nn.parallel.DistributedDataParallel
    model = kind(module, process_group=state.process_group, bucket_cap_mb=cap)
    model.register_comm_hook(state, powerSGD_hook)
    return model


def descend(model: Any, steps: Iterable[int]) -> list[float]:
    """Losses of all rows before each step of plain gradient descent, which has no state."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        x, y = batch(step % 4)
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(loss_of(model.module(x), y)))
        loss_of(model(shard(x, rank, world)), shard(y, rank, world)).backward()
        optimizer.step()
    return losses


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def trained(ours: bool, gloo: bool = False, cap: float = 25) -> tuple[list[float], list[Tensor]]:
    """The losses, and the weights."""
    group = dist.group.WORLD
    if gloo:
        group = dist.new_group(backend="gloo")
        _kept.append(group)
    model = wrapped(Crossed(), state_of(group), ours, cap)
    return descend(model, range(STEPS)), weights_of(model)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torchs"])
@pytest.mark.parametrize("world", [2, 3])
def test_trains_as_on_gloo(pool: Pool, world: int, ours: bool) -> None:
    """With all in one bucket, as torch's class would call several buckets' collectives crossed."""
    expected, gloos = pool.run(trained, False, True, world=world)[0]
    assert expected[-1] < 0.8 * expected[0]
    for losses, weights in pool.run(trained, ours, world=world):
        if world == 2:
            assert losses == expected
            assert equal(weights, gloos)
        else:  # Gloo adds three ranks in another order
            assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.beyond_gloo("torch's class cannot do this, and dreamcomm's is not for Gloo")
def test_several_buckets_of_dreamcomms_class(pool: Pool) -> None:
    """Matrices are compressed one by one, in whatever bucket: only their random starts differ."""
    expected, _ = pool.run(trained, True)[0]
    found = pool.run(trained, True, cap=0.01)
    assert found[0][0] == found[1][0]
    assert equal(found[0][1], found[1][1])
    assert found[0][0] == pytest.approx(expected, rel=2e-2)


def compressed() -> tuple[float, int, int]:
    """torch's rate, and the bytes of a step before the compression begins and of one after."""
    state = state_of(None)
    model = wrapped(Mlp(), state, ours=True)
    moved = []
    for step in range(START + 2):
        before = sum(one["sent"] for one in dreamcomm.stats().values())
        descend(model, [step])
        moved.append(sum(one["sent"] for one in dreamcomm.stats().values()) - before)
    return state.compression_stats()[0], moved[START - 1], moved[-1]


@pytest.mark.beyond_gloo("counts what only dreamcomm counts")
def test_fewer_bytes(pool: Pool) -> None:
    for rate, all_, few in pool.run(compressed):
        assert rate > 5
        assert few == pytest.approx(all_ / rate, rel=0.1)


def resumed(keeps: bool) -> bool:
    """Whether a run from a checkpoint has the bits of one without."""
    state = state_of(None)
    model = wrapped(Mlp(), state, ours=True)
    descend(model, range(6))
    saved = copy.deepcopy(model.module.state_dict()), pickle.dumps(state)
    descend(model, range(6, 12))
    again = pickle.loads(saved[1])
    if not keeps:
        again.error_dict = {}
    module = Mlp()
    module.load_state_dict(saved[0])
    other = wrapped(module, again, ours=True)
    descend(other, range(6, 12))
    return equal(weights_of(other), weights_of(model))


@pytest.mark.parametrize("keeps", [True, False])
def test_resumes_with_its_state(pool: Pool, keeps: bool) -> None:
    """The state is of buckets: only for a model that uses its layers as it registers them."""
    assert pool.run(resumed, keeps) == [keeps] * 2
