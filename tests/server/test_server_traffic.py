"""Bytes that servers and workers move, by their counters, beside those of an all_reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import dreamcomm
from helpers.pool import Pool
from server.serving import common_store, give_gradients, parameters, serve_rank, worker

pytestmark = pytest.mark.beyond_gloo("counts what only dreamcomm counts")

STEPS = 3
SHAPES = ((240, 1200), (60,), (), (240, 240))


def counted(workers: int, servers: int, staleness: int | None, gradients: bool) -> Any:
    rank, store = dist.get_rank(), common_store()
    tensors = parameters(*SHAPES)
    if rank < servers:
        return serve_rank(
            tensors, workers=workers, index=rank, servers=servers, store=store, staleness=staleness
        )
    with worker(tensors, servers, store=store, rank=rank, gradients=gradients) as optimizer:
        for step in range(STEPS):
            give_gradients(tensors, rank, step)
            optimizer.step()
        return optimizer.report()


def reduced() -> tuple[int, int]:
    """Bytes that a rank sends and receives for one all_reduce of as many elements."""
    one = dreamcomm.empty(sum(p.numel() for p in parameters(*SHAPES)) // 12 * 12)
    dist.all_reduce(one)
    counts = dreamcomm.stats()["all_reduce"]
    return counts["sent"], counts["received"]


@pytest.mark.parametrize(
    ("workers", "servers", "staleness", "gradients"),
    [(2, 1, 0, False), (3, 2, 0, False), (2, 2, 0, True), (2, 2, 1, False), (2, 1, None, False)],
)
def test_a_step_moves_the_parameters_twice(
    pool: Pool, workers: int, servers: int, staleness: int | None, gradients: bool
) -> None:
    found = pool.run(counted, workers, servers, staleness, gradients, world=workers + servers)
    reports, workers_reports = found[:servers], found[servers:]
    size = sum(p.nbytes for p in parameters(*SHAPES))
    back = 2 * size if gradients else size
    for rank, one in enumerate(workers_reports, servers):
        assert one.steps == STEPS
        assert one.pushed_bytes == STEPS * size
        assert one.pulled_bytes == size + STEPS * back  # it begins with a pull
        of_servers = [report.workers[rank] for report in reports]
        assert sum(counts.pushed_bytes for counts in of_servers) == one.pushed_bytes
        assert sum(counts.pulled_bytes for counts in of_servers) == one.pulled_bytes
        for counts in of_servers:
            assert (counts.pushes, counts.pulls, counts.state) == (STEPS, STEPS + 1, "left")
    for report in reports:
        assert report.updates == (STEPS if staleness == 0 else STEPS * workers)
        assert sum(report.staleness.values()) == workers * (STEPS + 1)
        assert sum(report.lag.values()) == workers * STEPS
        assert f"version {report.version}, {report.updates} updates" in str(report)
    # Two servers share the bytes.
    of_one = [report.workers[servers].pushed_bytes // STEPS for report in reports]
    assert sum(of_one) == size
    assert servers == 1 or max(of_one) < 0.84 * size


@pytest.mark.parametrize("world", [2, 3, 4])
def test_an_all_reduce_moves_less(pool: Pool, world: int) -> None:
    """2 (N - 1) / N in each direction together: what 2 of a server is compared with."""
    size = 4 * (sum(p.numel() for p in parameters(*SHAPES)) // 12 * 12)
    for sent, received in pool.run(reduced, world=world):
        assert sent == received == 2 * size * (world - 1) // world
