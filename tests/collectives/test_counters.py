"""The byte counters equal the textbook's formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("gloo counts no bytes")

COUNT = 12 * 50_000  # divisible by every world here and by their chunks
SIZE = 4 * COUNT  # bytes of the whole tensor


def traffic(kind: str) -> dict[str, int]:
    import dreamcomm

    world = dist.get_world_size()
    whole, part = torch.ones(COUNT), torch.ones(COUNT // world)
    before = counters(dreamcomm.stats(), kind)
    if kind == "all_reduce":
        dist.all_reduce(whole)
    elif kind == "reduce_scatter":
        dist.reduce_scatter_tensor(part, whole)
    else:
        dist.all_gather_into_tensor(whole, part)
    after = counters(dreamcomm.stats(), kind)
    return {name: after[name] - before[name] for name in after}


def counters(stats: Any, kind: str) -> dict[str, int]:
    found = stats.get(kind, {"calls": 0, "sent": 0, "received": 0})
    return {name: int(found[name]) for name in ("calls", "sent", "received")}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_every_rank_moves_its_share(pool: Pool, kind: str, algorithm: str, world: int) -> None:
    options = {"algorithm": algorithm, "fixed_order": algorithm != "ring"}
    share = (world - 1) * SIZE // world
    expected = 2 * share if kind == "all_reduce" else share
    for found in pool.run(traffic, kind, world=world, options=options):
        assert found == {"calls": 1, "sent": expected, "received": expected}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_master_moves_everything(pool: Pool, world: int) -> None:
    found = pool.run(traffic, "all_reduce", world=world, options={"algorithm": "master"})
    far = (world - 1) * SIZE
    assert found[0] == {"calls": 1, "sent": far, "received": far}
    assert found[1:] == [{"calls": 1, "sent": SIZE, "received": SIZE}] * (world - 1)


def results(dtype: torch.dtype) -> list[float]:
    data = torch.arange(1000, dtype=dtype) * (dist.get_rank() + 1)
    dist.all_reduce(data)
    return data.tolist()


@pytest.mark.parametrize("algorithm", ["direct", "ring", "master", "one_shot"])
def test_all_algorithms_give_the_sum(pool: Pool, algorithm: str) -> None:
    options = {"algorithm": algorithm, "fixed_order": algorithm != "ring"}
    found = pool.run(results, torch.int64, world=3, options=options)
    assert found == [[6 * i for i in range(1000)]] * 3


def explanation() -> str:
    import dreamcomm

    return dreamcomm.explain("all_reduce", 1 << 20)


def test_the_explanation_names_transport_and_algorithm(pool: Pool) -> None:
    for text in pool.run(explanation):
        for part in ("shm", "all_reduce", "direct", "ring", "fixed_order"):
            assert part in text
