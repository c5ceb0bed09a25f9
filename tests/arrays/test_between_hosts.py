"""The verbs between hosts, and where torch's Gloo carries everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import dreamcomm
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("calls dreamcomm's communicator")

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "two hosts": (2, {"hosts": "a,b"}),
    "two hosts of two and one": (3, {"hosts": "a,a,b"}),
    "gloo": (3, {"shared_memory": False}),
}
ways = pytest.mark.parametrize("way", WAYS)


def numbers(rank: int, count: int = 12) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.float32) * (rank + 1)


def each_verb() -> None:
    comm = dreamcomm.Communicator()
    rank, size = comm.rank, comm.size
    everyone = [numbers(one) for one in range(size)]
    total, mine, root = sum(everyone), numbers(rank), size - 1
    assert isinstance(total, np.ndarray)
    part = slice(12 // size * rank, 12 // size * (rank + 1))
    found = {
        "all_reduce": (comm.all_reduce(mine), total),
        "broadcast": (comm.broadcast(mine, root), everyone[root]),
        "all_gather": (comm.all_gather(mine), np.concatenate(everyone)),
        "reduce_scatter": (comm.reduce_scatter(mine), total[part]),
        "scatter": (comm.scatter(mine, root), everyone[root][part]),
        "all_to_all": (comm.all_to_all(mine), np.concatenate([one[part] for one in everyone])),
        "all_gather_v": (
            comm.all_gather_v(mine[: rank + 1]),
            np.concatenate([one[: r + 1] for r, one in enumerate(everyone)]),
        ),
        "reduce": (comm.reduce(mine, root), total if rank == root else None),
        "gather": (comm.gather(mine, root), np.concatenate(everyone) if rank == root else None),
        "tree": (comm.average({"a": mine})["a"], total / np.float32(size)),
        "async": (comm.all_reduce(mine, async_op=True).wait(), total),
    }
    for verb, (got, expected) in found.items():
        assert (got is None) == (expected is None), verb
        assert got is None or got.tobytes() == expected.tobytes(), verb
    assert mine.tobytes() == numbers(rank).tobytes()
    out = np.zeros(24, np.float32)
    comm.all_reduce(mine, out=out[::2])
    assert out[::2].tobytes() == total.tobytes()
    assert not out[1::2].any()
    if rank == 0:
        comm.send(numbers(7), root)
    elif rank == root:
        assert np.array_equal(comm.recv(mine, 0), numbers(7))
    large = {"rank": rank, "array": np.arange(10_000)}
    assert [one["rank"] for one in comm.all_gather_object(large)] == list(range(size))
    assert comm.broadcast_object(large if rank == root else None, root)["rank"] == root
    gathered = comm.gather_object(large, root)
    assert (gathered is None) == (rank != root)
    things = [np.full(5_000, one) for one in range(size)]
    assert comm.scatter_object(things if rank == 0 else None)[-1] == rank


def refused() -> None:
    comm = dreamcomm.Communicator()
    array, out = numbers(comm.rank), numbers(comm.rank)
    out.setflags(write=comm.rank != 1)
    words = "rank 1 of .: all_reduce: out" if comm.rank == 1 else "rank 1 refused its call 1: all"
    with pytest.raises(ValueError if comm.rank == 1 else dist.DistBackendError, match=words):
        comm.all_reduce(array, out=out)
    with pytest.raises(dist.DistBackendError, match="layout"):
        comm.average({f"of {comm.rank}": array})
    assert comm.all_reduce(np.ones(2)).tolist() == [comm.size] * 2


@ways
def test_each_verb(pool: Pool, way: str) -> None:
    world, options = WAYS[way]
    pool.run(each_verb, world=world, options=options)


@pytest.mark.parametrize("way", [one for one in WAYS if one != "gloo"])  # it compares no calls
def test_what_one_rank_refuses(pool: Pool, way: str) -> None:
    world, options = WAYS[way]
    pool.run(refused, world=world, options=options)
