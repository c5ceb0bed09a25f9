"""Random delays on both sides: no order of events hangs, and synchronous bits stay."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch.distributed as dist

from dreamcomm.server.pair import Pair
from helpers.pool import Pool
from server.serving import (
    Momentum,
    common_store,
    differing,
    give_gradients,
    parameters,
    serve_rank,
    simulated,
    values,
    worker,
)

SHAPES = ((600_000,), (3, 2), (20_000,), ())


def delay(seed: int, longest: float) -> None:
    """Has messages of this process be sent, and looked for, a moment later."""
    generator, send, following, look = random.Random(seed), Pair.send, Pair.next, Pair.look

    def late() -> None:
        if generator.random() < 0.3:
            time.sleep(generator.random() * longest)

    def late_send(self: Pair, *args: Any, **kwargs: Any) -> None:
        late()
        send(self, *args, **kwargs)

    def late_next(self: Pair, *args: Any) -> Any:
        late()
        return following(self, *args)

    def late_look(self: Pair) -> Any:
        late()
        return look(self)

    Pair.send, Pair.next, Pair.look = late_send, late_next, late_look  # type: ignore[assignment, method-assign]


def train(servers: int, staleness: int | None, steps: int, longest: float, seed: int) -> Any:
    """Workers also pull, leave and join again."""
    rank, world, store = dist.get_rank(), dist.get_world_size(), common_store()
    kept = Pair.send, Pair.next, Pair.look
    delay(100 * seed + rank, longest)
    try:
        tensors = parameters(*SHAPES, value=0.5)
        if rank < servers:
            return serve_rank(
                tensors, Momentum, workers=world - servers, index=rank, servers=servers,
                store=store, staleness=staleness,
            )  # fmt: skip
        generator = random.Random(seed + rank)
        optimizer = worker(tensors, servers, store=store, rank=rank, gradients=staleness == 0)
        for step in range(steps):
            give_gradients(tensors, rank, step)
            optimizer.step()
            if generator.random() < 0.2:
                optimizer.pull()
            if staleness != 0 and rank > servers and generator.random() < 0.2:
                optimizer.close()
                optimizer = worker(tensors, servers, store=store, rank=rank)
        store.add("done", 1)
        if staleness != 0 and rank == servers:
            # The servers would end when another one has left to join again. One that joins begins
            # where the slowest is, so it may need more than these steps of this one.
            while store.add("done", 0) < world - servers:
                optimizer.step()
        optimizer.close()
        return values(tensors)
    finally:
        Pair.send, Pair.next, Pair.look = kept  # type: ignore[method-assign]


def check(pool: Pool, servers: int, staleness: int | None, steps: int, **how: Any) -> None:
    found = pool.run(
        train, servers, staleness, steps, 0.003, 1, world=3 + servers, timeout=60 + steps, **how
    )
    for report in found[:servers]:
        first, *others = (one.pushes for _, one in sorted(report.workers.items()))
        assert others == [steps, steps]
        assert first >= steps
        assert {one.state for one in report.workers.values()} == {"left"}
        assert staleness is None or max(report.staleness) <= staleness
    if staleness == 0:
        tensors = parameters(*SHAPES, value=0.5)
        ranks = range(servers, servers + 3)
        expected = simulated(tensors, Momentum(tensors), [ranks] * steps)[-1]
        for weights in found[servers:]:
            assert differing(weights, expected) == []


@pytest.mark.parametrize(("servers", "staleness"), [(1, 0), (2, 0), (2, 1), (1, None)])
def test_random_delays(pool: Pool, servers: int, staleness: int | None) -> None:
    check(pool, servers, staleness, 12)


@pytest.mark.long
@pytest.mark.parametrize("env", [{}, {"DREAMCOMM_SHARED_MEMORY": "0"}], ids=["shm", "gloo"])
@pytest.mark.parametrize(("servers", "staleness"), [(1, 0), (2, 0), (2, 1), (2, 3), (1, None)])
def test_many_random_delays(
    pool: Pool, servers: int, staleness: int | None, env: dict[str, str]
) -> None:
    check(pool, servers, staleness, 200, env=env)
