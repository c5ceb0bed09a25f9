"""Types that are only moved: ranks that take different ones are told, as of any other type."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Pool
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("gloo moves these as bytes of any type")

NAMES = [
    "uint8",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float8_e8m0fnu",
]


def broadcast_as(names: list[str]) -> str:
    data = torch.zeros(8, dtype=torch.uint8).view(getattr(torch, names[dist.get_rank()]))
    return error_of(lambda: dist.broadcast(data, 0))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_take_different_types_are_told(pool: Pool, world: int) -> None:
    for one, other in itertools.pairwise([*NAMES, NAMES[0]]):
        names = [one] * (world - 1) + [other]
        for text in pool.run(broadcast_as, names, world=world):
            assert "the ranks made different calls" in text, text
            assert f"8 x {one}" in text, text
            assert f"8 x {other}" in text, text
            assert "the group stays usable" in text, text


def move_all(name: str) -> list[list[int]]:
    rank, world = dist.get_rank(), dist.get_world_size()

    def moved(*bytes_: int) -> torch.Tensor:
        return torch.tensor(bytes_, dtype=torch.uint8).view(getattr(torch, name))

    data = moved(*range(rank, rank + 4))
    parts = [moved(0, 0, 0, 0) for _ in range(world)]
    dist.all_gather(parts, data)
    dist.broadcast(data, 1)
    return [part.view(torch.uint8).tolist() for part in (*parts, data)]


@pytest.mark.parametrize("name", [*NAMES, "complex32"])
def test_each_of_them_is_moved(pool: Pool, name: str) -> None:
    for found in pool.run(move_all, name):
        assert found == [[0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize("name", NAMES[1:])
def test_none_of_them_is_added(pool: Pool, name: str) -> None:
    for text in pool.run(add, name):
        assert "SUM is not defined on tensors of type" in text, text


def add(name: str) -> str:
    try:
        dist.all_reduce(torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name)))
    except ValueError as error:
        return str(error)
    return "no error"
