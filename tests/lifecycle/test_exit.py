"""A process that ends without destroying its group ends, and tells its peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.census import shared_memory_files
from helpers.pool import Fresh
from helpers.processes import replies, values
from lifecycle.groups import error_of, use_everything

kept: list[Any] = []  # what a careless program leaves in its globals


def leave_open(rank: int, backend: str, store: str, pending: bool) -> int:
    """Makes a group and returns with it: the process then ends as it is."""
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    use_everything()
    kept.append(dist.new_group())
    if pending and rank == 0:  # no peer ever calls these
        kept.append(dist.all_reduce(torch.ones(10), async_op=True))
        kept.append(dist.irecv(torch.ones(10), 1))
    return rank


@pytest.mark.parametrize("pending", [False, True], ids=["idle", "pending"])
def test_a_process_ends_without_destroy(
    fresh: Fresh, backend: str, tmp_path: Path, pending: bool
) -> None:
    if backend == "gloo" and pending:
        pytest.skip("gloo waits for its peers")
    files = shared_memory_files()
    store = str(tmp_path / "store")
    ranks = fresh.start(leave_open, backend, store, pending, group=False)
    assert values(replies(ranks, 60)) == [0, 1]
    assert [process.finish() for process in ranks] == [0, 0], ranks[0].output()
    assert "terminate" not in ranks[0].output() + ranks[1].output()
    assert shared_memory_files() <= files


def outlive() -> str:
    """Rank 1 ends its process in order, but without a word; rank 0 waits for it."""
    import sys

    use_everything()
    if dist.get_rank() == 1:
        sys.exit(0)
    return error_of(lambda: dist.all_reduce(torch.ones(10)))


@pytest.mark.beyond_gloo("gloo names no rank")
def test_a_rank_that_ended_in_order_is_named(fresh: Fresh) -> None:
    found = replies(fresh.start(outlive, group_timeout=300), 60)
    assert found[0].error is None, found[0].error
    assert "rank 1" in found[0].value
