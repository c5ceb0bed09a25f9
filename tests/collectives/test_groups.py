"""Several groups: overlapping, in flight at once, split, destroyed, made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Pool


def value(number: float) -> torch.Tensor:
    return torch.tensor([number])


def overlapping() -> list[float]:
    rank = dist.get_rank()
    members = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [0, 1, 2, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    found = []
    for _ in range(5):
        for ranks, group in zip(members, groups, strict=True):
            if rank in ranks:
                data = value(rank + 1)
                dist.all_reduce(data, group=group)
                found.append(data.item())
    return found[: len(found) // 5]


def test_overlapping_groups(pool: Pool) -> None:
    assert pool.run(overlapping, world=4) == [
        [3.0, 5.0, 4.0, 10.0],
        [3.0, 5.0, 10.0],
        [5.0, 7.0, 4.0, 10.0],
        [7.0, 5.0, 10.0],
    ]


def in_flight() -> bool:
    """Many operations of several groups under way, waited for in another order."""
    groups = [dist.group.WORLD, *(dist.new_group() for _ in range(3))]
    started = []
    for number in range(20):
        for index, group in enumerate(groups):
            data = torch.full((100 * number + 1,), float(index + number))
            started.append((data, dist.all_reduce(data, group=group, async_op=True)))
    for _, work in reversed(started):
        work.wait()
    expected = [2.0 * (index + number) for number in range(20) for index in range(4)]
    return all(bool(data.eq(x).all()) for (data, _), x in zip(started, expected, strict=True))


def test_several_groups_in_flight(pool: Pool) -> None:
    assert pool.run(in_flight) == [True, True]


def opposite_orders() -> list[float]:
    """Asynchronous calls of two groups may come in another order on each rank."""
    first, second = dist.new_group(), dist.new_group()
    order = [first, second] if dist.get_rank() == 0 else [second, first]
    data = {group: value(1 + (group is second)) for group in order}
    works = [dist.all_reduce(data[group], group=group, async_op=True) for group in order]
    for work in works:
        work.wait()
    return [data[first].item(), data[second].item()]


def test_groups_do_not_wait_for_each_other(pool: Pool) -> None:
    assert pool.run(opposite_orders) == [[2.0, 4.0]] * 2


def unsorted() -> list[float]:
    group = dist.new_group([2, 0], sort_ranks=False) if _can_sort() else dist.new_group([0, 2])
    out = [value(-1), value(-1)]
    if dist.get_rank() in (0, 2):
        dist.all_gather(out, value(dist.get_rank()), group=group)
    return [x.item() for x in out]


def _can_sort() -> bool:
    import inspect

    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def test_a_group_in_another_order_of_ranks(pool: Pool) -> None:
    found = pool.run(unsorted, world=3)
    assert found[0] == found[2] == ([2.0, 0.0] if _can_sort() else [0.0, 2.0])
    assert found[1] == [-1.0, -1.0]


def split() -> tuple[int, float]:
    ranks = [0, 1] if dist.get_rank() < 2 else [2, 3]
    group: Any = dist.group.WORLD
    part = group.split_group(ranks, None, None, None)
    work = part.allreduce([data := value(dist.get_rank() + 1)])
    work.wait()
    return part.size(), data.item()


@pytest.mark.beyond_gloo("gloo's split wants the group's options")
def test_a_split_group(pool: Pool) -> None:
    assert pool.run(split, world=4) == [(2, 3.0), (2, 3.0), (2, 7.0), (2, 7.0)]


def partial_destruction() -> list[float]:
    found = []
    for number in range(10):
        group = dist.new_group()
        data = value(number)
        dist.all_reduce(data, group=group)
        dist.destroy_process_group(group)
        dist.all_reduce(data)
        found.append(data.item())
    return found


def test_groups_made_and_destroyed_in_turn(pool: Pool) -> None:
    assert pool.run(partial_destruction) == [[4.0 * number for number in range(10)]] * 2


def mesh() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    found = []
    for name in ("rows", "columns"):
        data = value(10.0 ** dist.get_rank())
        dist.all_reduce(data, group=grid.get_group(name))
        found.append(data.item())
    return found


def test_a_device_mesh(pool: Pool) -> None:
    assert pool.run(mesh, world=4) == [
        [101.0, 11.0],
        [1010.0, 11.0],
        [101.0, 1100.0],
        [1010.0, 1100.0],
    ]


def sequence_numbers() -> list[int]:
    world: Any = dist.group.WORLD
    group = world._get_backend(torch.device("cpu"))
    before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(value(1))
    dist.barrier()
    return [before, group._get_sequence_number_for_group()]


@pytest.mark.beyond_gloo("counts differently")
def test_sequence_numbers_count_collectives(pool: Pool) -> None:
    (first, second) = pool.run(sequence_numbers)
    assert first == second
    assert first[1] - first[0] == 4
