"""The calls of torch.distributed under all of their names, and functional collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from helpers.pool import Pool

GATHER_NAMES = ("all_gather_into_tensor", "all_gather_single", "_all_gather_base")
SCATTER_NAMES = ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base")


def available(names: tuple[str, ...]) -> list[str]:
    """Those that the installed torch has."""
    return [name for name in names if hasattr(dist, name)]


def gather_by(name: str) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(2 * world)
    getattr(dist, name)(out, torch.tensor([rank + 0.25, rank + 0.5]))
    return out.tolist()


@pytest.mark.parametrize("name", available(GATHER_NAMES))
def test_all_gather_of_one_tensor(pool: Pool, name: str) -> None:
    expected = [rank + part for rank in range(3) for part in (0.25, 0.5)]
    assert pool.run(gather_by, name, world=3) == [expected] * 3


def scatter_by(name: str) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(2)
    getattr(dist, name)(out, torch.arange(2.0 * world) * (rank + 1))
    return out.tolist()


@pytest.mark.parametrize("name", available(SCATTER_NAMES))
def test_reduce_scatter_of_one_tensor(pool: Pool, name: str) -> None:
    assert pool.run(scatter_by, name, world=3) == [[0.0, 6.0], [12.0, 18.0], [24.0, 30.0]]


def two_dimensional() -> tuple[list[Any], list[Any]]:
    """A stack instead of a concatenation, as torch allows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stack = torch.zeros(world, 2, 3)
    dist.all_gather_into_tensor(stack, torch.full((2, 3), float(rank)))
    out = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(out, stack)
    return stack[:, 0, 0].tolist(), out.flatten().tolist()


@pytest.mark.beyond_gloo("takes concatenated outputs only")
def test_stacked_outputs(pool: Pool) -> None:
    found = pool.run(two_dimensional, world=3)
    assert found == [([0.0, 1.0, 2.0], [3.0 * rank] * 6) for rank in range(3)]


def functional() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    x = torch.arange(float(world)) + rank
    splits = [1] * world
    many = funcol.all_reduce_coalesced([x, 2 * x], "sum", group)
    found = {
        "all_reduce": funcol.all_reduce(x, "sum", group),
        "all_reduce_avg": funcol.all_reduce(x, "avg", group),
        "all_reduce_coalesced": torch.cat([y + 0 for y in many]),
        "all_gather_tensor": funcol.all_gather_tensor(x, 0, group),
        "reduce_scatter_tensor": funcol.reduce_scatter_tensor(x, "sum", 0, group),
        "all_to_all_single": funcol.all_to_all_single(x, splits, splits, group),
        "broadcast": funcol.broadcast(x, 1, group),
    }
    return {name: funcol.wait_tensor(value).tolist() for name, value in found.items()}


@pytest.mark.beyond_gloo("AVG")
def test_functional_collectives(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(functional, world=2)):
        assert found == {
            "all_reduce": [1.0, 3.0],
            "all_reduce_avg": [0.5, 1.5],
            "all_reduce_coalesced": [1.0, 3.0, 2.0, 6.0],
            "all_gather_tensor": [0.0, 1.0, 1.0, 2.0],
            "reduce_scatter_tensor": [[1.0], [3.0]][rank],
            "all_to_all_single": [[0.0, 1.0], [1.0, 2.0]][rank],
            "broadcast": [1.0, 2.0],
        }


def sparse() -> list[list[float]]:
    rank = dist.get_rank()
    indices = torch.tensor([[rank, 3]])
    data = torch.sparse_coo_tensor(indices, torch.tensor([1.0, rank + 1.0]), (5,))
    dist.all_reduce(data)
    dense: list[list[float]] = data.to_dense().tolist()
    return dense


def test_sparse_all_reduce(pool: Pool) -> None:
    assert pool.run(sparse, world=2) == [[1.0, 1.0, 0.0, 3.0, 0.0]] * 2


def futures() -> tuple[float, float]:
    data = torch.tensor([dist.get_rank() + 1.0])
    work = dist.all_reduce(data, async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    result = doubled.wait()
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    return data.item(), result.item()


def test_a_work_carries_a_future(pool: Pool) -> None:
    assert pool.run(futures, world=2) == [(3.0, 6.0)] * 2


def autograd() -> list[float]:
    from torch.distributed.nn.functional import all_reduce

    x = torch.tensor([dist.get_rank() + 1.0], requires_grad=True)
    y = all_reduce(x * 3, group=dist.group.WORLD)  # its default is the first group ever
    (y * (dist.get_rank() + 1)).sum().backward()
    assert x.grad is not None
    return [y.item(), x.grad.item()]


def test_collectives_of_autograd(pool: Pool) -> None:
    assert pool.run(autograd, world=2) == [[9.0, 9.0]] * 2


def uneven_blocks() -> list[float]:
    """Rank r is for r + 1 elements of every rank's list."""
    rank, world = dist.get_rank(), dist.get_world_size()
    blocks = [torch.full((r + 1,), float(rank + r)) for r in range(world)]
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, blocks)
    return out.tolist()


def test_reduce_scatter_of_uneven_blocks(pool: Pool) -> None:
    found = pool.run(uneven_blocks, world=3)
    assert found == [[3.0 + 3.0 * rank] * (rank + 1) for rank in range(3)]


def one_output_for_all() -> list[float]:
    out = torch.zeros(2)
    dist.all_gather([out] * dist.get_world_size(), torch.full((2,), float(dist.get_rank())))
    return out.tolist()


def test_all_gather_into_one_tensor_keeps_the_last_block_everywhere(pool: Pool) -> None:
    assert pool.run(one_output_for_all, world=3) == [[2.0, 2.0]] * 3
