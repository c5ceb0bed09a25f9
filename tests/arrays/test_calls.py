"""The compiled calls on buffers have the bits of torch's path, and refuse what they cannot read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dreamcomm import _C
from dreamcomm._torch.groups import backend_of
from helpers.pool import Pool

BROADCAST, ALL_REDUCE, REDUCE, ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL = range(1, 9)
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
TYPES = ["uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "bool"]
pytestmark = pytest.mark.beyond_gloo("calls dreamcomm's backend")


def own(name: str, count: int = 24) -> np.ndarray[Any, Any]:
    """This rank's numbers."""
    random = np.random.default_rng(dist.get_rank())
    return (random.random(count) * 5).astype(name)


def calls() -> _C.ArrayCalls:
    return _C.ArrayCalls(backend_of(None))


def reductions(name: str) -> None:
    made = calls()
    for number, op in enumerate(OPS):
        expected = torch.from_numpy(own(name))
        mine = own(name)
        try:
            dist.all_reduce(expected, getattr(dist.ReduceOp, op))
        except ValueError:
            if not np.iscomplexobj(mine):  # of these torch refuses more
                assert not made.all_reduce(mine, number), f"{op} is torch's to refuse"
            continue
        assert made.all_reduce(mine, number)
        assert mine.tobytes() == expected.numpy().tobytes(), op
        mine, out = own(name), np.zeros_like(mine)
        assert made.run(ALL_REDUCE, number, 0, (mine,), (out,), 1, 1)
        assert out.tobytes() == expected.numpy().tobytes(), op
        assert mine.tobytes() == own(name).tobytes()


def motions() -> None:
    made, rank, world = calls(), dist.get_rank(), dist.get_world_size()
    mine = own("float32")
    everyone = np.empty((world, mine.size), "float32")
    assert made.run(ALL_GATHER, -1, 0, (mine,), (everyone,), 1, world)
    parts = everyone.reshape(world, -1)
    assert np.array_equal(parts[rank], mine)
    swapped = np.empty_like(mine[: 24 - 24 % world])
    given = np.ascontiguousarray(mine[: swapped.size])
    assert made.run(ALL_TO_ALL, -1, 0, (given,), (swapped,), world, world)
    step = swapped.size // world
    for other in range(world):
        part = parts[other][rank * step : (rank + 1) * step]
        assert np.array_equal(swapped[other * step : (other + 1) * step], part)
    root = world - 1
    out = bytearray(mine.nbytes)
    if rank == root:
        assert made.run(BROADCAST, -1, root, (mine,), (mine,), 1, 1)
    else:
        view = memoryview(out).cast("f")
        assert made.run(BROADCAST, -1, root, (), (view,), 1, 1)
        assert bytes(out) == parts[root].tobytes()


def refused() -> None:
    made = calls()
    constant = own("float32")
    constant.setflags(write=False)
    for array in (
        own("float32")[::2],
        constant,
        np.zeros(3, ">f4"),
        np.zeros(2, object),
        [1.0],
        None,
    ):
        assert not made.all_reduce(array, 0)
    mixed = (own("float32"),), (own("float64"),)
    assert made.run(ALL_REDUCE, 0, 0, *mixed, 1, 1) is False
    assert not made.run(ALL_GATHER, -1, 0, (own("int64"),), (np.zeros(49, "int64"),), 1, 2), (
        "unequal"
    )
    fine = np.ones(3)
    assert made.all_reduce(fine, 0)
    assert fine[0] == dist.get_world_size()


def mismatched() -> None:
    made = calls()
    with pytest.raises(dist.DistBackendError, match="the ranks made different calls"):
        made.all_reduce(own("float32" if dist.get_rank() == 0 else "float64"), 0)
    fine = np.ones(3)
    assert made.all_reduce(fine, 0)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", TYPES)
def test_reductions(pool: Pool, name: str, world: int) -> None:
    pool.run(reductions, name, world=world)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_motions(pool: Pool, world: int) -> None:
    pool.run(motions, world=world)


def test_what_is_left_to_torchs_path(pool: Pool) -> None:
    pool.run(refused, world=2)


def test_ranks_that_disagree(pool: Pool) -> None:
    pool.run(mismatched, world=2)
