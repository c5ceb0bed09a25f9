"""Weights that are read belong to one version, while other workers push.

All gradients are one and so is the learning rate: after n updates every element is -n.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.pool import Pool
from server.serving import Board, board_file, common_store, parameters, serve_rank, worker

SMALL = ((5,), ())
PIECES = ((400_000,), (3, 280_000), (260_000,))  # three pieces of 2 MiB


def is_torn(tensors: list[Tensor], version: int) -> bool:
    lowest = min(one.detach().min().item() for one in tensors)
    highest = max(one.detach().max().item() for one in tensors)
    return not lowest == highest == -version


def pull_and_push(path: str, shapes: Any, pulls: int, staleness: int | None) -> Any:
    """Ranks 1 and 2 push until rank 3, which observes, has pulled so often, and seen versions.

    Returns the pulls, and those that were torn.
    """
    rank, store = dist.get_rank(), common_store()
    tensors = parameters(*shapes)
    if rank == 0:
        return serve_rank(tensors, workers=2, store=store, staleness=staleness, lr=1.0)
    board, count, torn, versions = Board(path), 0, 0, set()
    with worker(tensors, store=store, rank=rank, observer=rank == 3) as optimizer:
        for one in tensors:
            one.grad = torch.ones_like(one)
        while count < pulls or len(versions) < pulls // 20 if rank == 3 else not board[3]:
            optimizer.pull() if rank == 3 else optimizer.step()
            count += 1
            torn += is_torn(tensors, optimizer.version)
            versions.add(optimizer.version)
        board[rank] = 1
    return count, torn


def check(pool: Pool, folder: Path, shapes: Any, pulls: int, staleness: int | None) -> int:
    report, *ranks = pool.run(
        pull_and_push, board_file(folder), shapes, pulls, staleness, world=4, timeout=600
    )
    assert report.updates < 1 << 24, "all numbers are whole"
    assert [torn for _, torn in ranks] == [0, 0, 0]
    return sum(count for count, _ in ranks)


@pytest.mark.parametrize("staleness", [None, 2, 0], ids=["unbounded", "bounded", "synchronous"])
@pytest.mark.parametrize("shapes", [SMALL, PIECES], ids=["small", "three pieces"])
def test_no_read_is_torn(pool: Pool, tmp_path: Path, shapes: Any, staleness: int | None) -> None:
    assert check(pool, tmp_path, shapes, 100, staleness) >= 100


@pytest.mark.long
@pytest.mark.parametrize(
    ("shapes", "staleness", "pulls"),
    [(SMALL, None, 50_000), (SMALL, 2, 20_000), (PIECES, None, 2_000)],
    ids=["small", "bounded", "three pieces"],
)
def test_no_read_of_many_is_torn(
    pool: Pool, tmp_path: Path, shapes: Any, staleness: int | None, pulls: int
) -> None:
    """More than 10^5 together."""
    assert check(pool, tmp_path, shapes, pulls, staleness) >= pulls
