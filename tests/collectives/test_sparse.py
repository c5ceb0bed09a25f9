"""all_reduce of sparse tensors: the ranks compare their calls before Gloo carries them."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Fresh, Pool
from helpers.processes import replies
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("Gloo's words are others")


def eye(n: int = 3) -> torch.Tensor:
    return torch.eye(n).to_sparse()


def unlike() -> list[str]:
    """Errors of calls that contradict each other, and then a good one."""
    rank = dist.get_rank()
    told = [
        error_of(lambda: dist.all_reduce(eye() if rank == 0 else torch.ones(9))),
        error_of(lambda: dist.all_reduce(eye(3 + rank))),
        error_of(lambda: dist.all_reduce(eye() if rank == 0 else eye().to(torch.int64))),
    ]
    total = eye()
    dist.all_reduce(total)
    assert bool((total.to_dense() == dist.get_world_size() * torch.eye(3)).all())
    return told


def test_calls_that_differ_are_told(pool: Pool) -> None:
    for found in pool.run(unlike, world=2):
        kind, shape, dtype = found
        assert "all_reduce(SUM, a sparse tensor) as call" in kind
        assert "all_reduce(SUM, 9 x float32" in kind
        assert "test_sparse.py:" in kind
        assert "float32 of shape [3, 3] in the layout Sparse" in shape
        assert "float32 of shape [4, 4] in the layout Sparse" in shape
        assert "int64 of shape [3, 3]" in dtype
        for text in found:
            assert "the ranks made different calls" in text
            assert "the group stays usable" in text


def left_alone() -> tuple[str, float]:
    dist.all_reduce(eye())
    if dist.get_rank() == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    return error_of(lambda: dist.all_reduce(eye())), time.monotonic() - begin


def test_a_dead_rank_is_told(fresh: Fresh, slack: float) -> None:
    ranks = fresh.start(left_alone, world=3)
    for found in replies(ranks[:2], 60):
        text, seconds = found.value
        assert "the process of rank 2 has ended" in text
        assert seconds < 1.3 + slack
