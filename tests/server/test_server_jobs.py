"""Ranks and the number of workers as torchrun, or an initialised default group, says."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

import dreamcomm
from dreamcomm.server import ParameterServer, Worker
from helpers.pool import Fresh, Pool
from server.serving import (
    PATIENCE,
    Momentum,
    differing,
    free_address,
    give_gradients,
    parameters,
    simulated,
    start_fast,
    values,
)

SHAPES, STEPS = ((300,), (3, 2)), 4


def take_role(rank: int, servers: int) -> Any:
    """As in a script that all ranks run."""
    tensors = parameters(*SHAPES, value=0.5)
    if rank < servers:
        server = ParameterServer(tensors, Momentum, index=rank, servers=servers, timeout=PATIENCE)
        assert server._workers == 2
        return server.serve()
    optimizer = Worker(tensors, servers, timeout=PATIENCE)
    for step in range(STEPS):
        give_gradients(tensors, optimizer.rank, step)
        optimizer.step()
    optimizer.close()
    return optimizer.rank, values(tensors)


def check(found: list[Any], servers: int, ranks: list[int]) -> None:
    for report in found[:servers]:
        assert sorted(report.workers) == ranks
        assert report.updates == STEPS
    assert [rank for rank, _ in found[servers:]] == ranks
    tensors = parameters(*SHAPES, value=0.5)
    expected = simulated(tensors, Momentum(tensors), [ranks] * STEPS)[-1]
    for _, weights in found[servers:]:
        assert differing(weights, expected) == []


def by_environment(rank: int, servers: int, ranked: bool) -> Any:
    start_fast()
    if ranked:
        os.environ["RANK"] = str(rank)
    else:  # workers number themselves
        os.environ.pop("RANK", None)
    return take_role(rank, servers)


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_job_of_torchrun(fresh: Fresh, servers: int) -> None:
    host, _, port = free_address().rpartition(":")
    env = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(servers + 2)}
    found = fresh.run(by_environment, servers, True, world=servers + 2, group=False, env=env)
    check(found, servers, [servers, servers + 1])


def test_workers_number_themselves(fresh: Fresh) -> None:
    host, _, port = free_address().rpartition(":")
    env = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": "3"}
    report, *workers = fresh.run(by_environment, 1, False, world=3, group=False, env=env)
    check([report, *sorted(workers, key=lambda one: one[0])], 1, [0, 1])


def in_a_group(servers: int) -> Any:
    assert dist.is_initialized()
    found = take_role(dist.get_rank(), servers)
    dist.barrier()
    one = dreamcomm.zeros(3) + dist.get_rank()
    dist.all_reduce(one)  # the default group works as before
    assert int(one[0]) == sum(range(dist.get_world_size()))
    return found


@pytest.mark.parametrize("servers", [1, 2])
def test_a_default_group(pool: Pool, servers: int) -> None:
    found = pool.run(in_a_group, servers, world=servers + 2)
    check(found, servers, [servers, servers + 1])


def groups_around(rounds: int) -> Any:
    """Groups of torch are made and used while pairs are, in another order on each rank."""
    rank = dist.get_rank()
    for number in range(rounds):
        group = dist.new_group([0, 1, 2])
        tensors = parameters((5,))
        if rank == 0:
            ParameterServer(tensors, Momentum, name=str(number), timeout=PATIENCE).serve()
        else:
            with Worker(tensors, name=str(number), timeout=PATIENCE) as optimizer:
                give_gradients(tensors, rank, 0)
                optimizer.step()
        dist.barrier(group)
        dist.destroy_process_group(group)
    return True


@pytest.mark.beyond_gloo("is about groups of dreamcomm")
def test_groups_are_made_around_servers(pool: Pool) -> None:
    assert pool.run(groups_around, 3, world=3) == [True] * 3
