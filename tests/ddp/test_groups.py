"""The wrapper on other groups: of several hosts, of Gloo, without shared memory, of some ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from ddp.models import batch, make, norm, rows_of
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

Trained = tuple[list[float], list[Tensor]]


def train(model: nn.Module, group: Any) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    norms = []
    for step in range(5):
        x, y = (
            rows_of(one, dist.get_rank(group), dist.get_world_size(group)) for one in batch(step)
        )
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        norms.append(norm(model))
        optimizer.step()
    return norms, [p.detach().clone() for p in model.parameters()]


def both(kind: str, name: str) -> tuple[Trained, Trained] | None:
    """Of our class and of torch's, on a group of that kind; None on a rank outside of it."""
    group: Any = dist.group.WORLD
    if kind == "gloo":
        group = dist.new_group(backend="gloo")
    elif kind == "some ranks":
        group = dist.new_group([1, 2])
        if dist.get_rank() not in (1, 2):
            return None
    ours = dreamcomm.DistributedDataParallel(make(name), process_group=group, bucket_cap_mb=0.2)
    theirs = nn.parallel.DistributedDataParallel(
        make(name), process_group=group, find_unused_parameters=name == "odd"
    )
    return train(ours, group), train(theirs, group)


def check(found: list[Any], *, bits: bool = True) -> None:
    for one in found:
        if one is None:
            continue
        (norms, weights), (expected_norms, expected) = one
        if bits:
            assert norms == expected_norms
            assert all(map(torch.equal, weights, expected))
        else:
            assert norms == pytest.approx(expected_norms, rel=1e-5)
            for weight, other in zip(weights, expected, strict=True):
                assert torch.allclose(weight, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hosts", ["a,b", "a,a,b,b"])
def test_several_hosts(pool: Pool, hosts: str) -> None:
    world = len(hosts.split(","))
    check(pool.run(both, "world", "odd", world=world, env={"DREAMCOMM_HOSTS": hosts}))


def test_a_group_of_gloo(pool: Pool) -> None:
    check(pool.run(both, "gloo", "odd"))


def test_a_group_without_shared_memory(pool: Pool) -> None:
    check(pool.run(both, "world", "gpt", options={"shared_memory": False}))


def test_a_group_without_a_heap(pool: Pool) -> None:
    check(pool.run(both, "world", "mlp", env={"DREAMCOMM_HEAP_BYTES": "0"}))


def test_a_group_of_some_ranks(pool: Pool) -> None:
    check(pool.run(both, "some ranks", "cnn", world=3))


def test_a_group_of_one_rank(pool: Pool) -> None:
    check(pool.run(both, "world", "odd", world=1))


def replicated(word: str) -> Trained | str | None:
    group = dist.new_group([1, 2])
    try:
        if word == "both":
            dreamcomm.replicate(make("mlp"), group=dist.group.WORLD, process_group=group)
        elif dist.get_rank() in (1, 2):
            return train(dreamcomm.replicate(make("mlp"), **{word: group}), group)
    except ValueError as error:
        return str(error)
    return None


def test_replicate_takes_a_group_of_some_ranks_by_either_word(pool: Pool) -> None:
    expected = pool.run(both, "some ranks", "mlp", world=3)
    for word in ("group", "process_group"):
        found = pool.run(replicated, word, world=3)
        pairs = zip(found, expected, strict=True)
        check([None if one is None else (one, two[0]) for one, two in pairs])
    for text in pool.run(replicated, "both", world=3):
        assert text == "replicate: give mesh or group, not both"
