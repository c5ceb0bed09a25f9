"""Forked children of a rank, such as data loaders' workers, do not disturb its group."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import dreamcomm
from helpers.census import census
from helpers.pool import Fresh
from lifecycle.groups import error_of, use_everything


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def load_data() -> list[float]:
    """Collectives between the batches of forked workers, epoch after epoch."""
    use_everything()
    totals = []
    for _ in range(2):
        loader = DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork")
        total = torch.zeros(1)
        for part in loader:
            mean = part.sum().reshape(1)
            dist.all_reduce(mean, async_op=False)
            total += mean
        totals.append(total.item())
    use_everything()
    assert census().children == 0
    return totals


def test_data_loader_workers(fresh: Fresh) -> None:
    assert fresh.run(load_data) == [[992.0, 992.0]] * 2


def begin_in_background() -> None:
    dist.all_reduce(torch.ones(2), async_op=True)


def fork_and_leave(how: str) -> int:
    """A child ends in some way while the parents go on, also after it is gone."""
    use_everything()
    child = os.fork()
    if child == 0:
        if how == "destroy":
            dist.destroy_process_group()
        elif how == "call":
            calls = (dist.barrier, begin_in_background, dreamcomm.stats)
            refused = [error_of(call) for call in calls]
            os._exit(0 if all("forked" in text for text in refused) else 3)
        os._exit(0)
    use_everything()
    _, status = os.waitpid(child, 0)
    use_everything()
    return os.waitstatus_to_exitcode(status)


def wait_in_a_child() -> int:
    """For calls that rank 0 began, and rank 1 makes once the child has ended."""
    store = dist.distributed_c10d._get_default_store()
    data = torch.ones(3)
    if dist.get_rank() == 1:
        store.wait(["ended"])
        dist.all_reduce(data)
        dist.send(data, 0)
        return 0
    works = [dist.all_reduce(data, async_op=True), dist.irecv(torch.ones(3), 1)]
    child = os.fork()
    if child == 0:
        waits = [partial(work.wait, *time) for work in works for time in ((), (timedelta(1),))]
        waits += [work.get_future for work in works]
        refused = [error_of(wait) for wait in waits]
        os._exit(0 if all("forked" in text for text in refused) else 3)
    _, status = os.waitpid(child, 0)
    store.set("ended", "")
    for work in works:
        assert work is not None
        work.wait()
    assert data.tolist() == [2.0, 2.0, 2.0]
    return os.waitstatus_to_exitcode(status)


@pytest.mark.beyond_gloo("gloo waits on")
def test_a_child_that_waits_for_a_call_of_its_parent_is_refused(fresh: Fresh) -> None:
    assert fresh.run(wait_in_a_child) == [0, 0]


@pytest.mark.beyond_gloo("gloo shares its sockets with the child")
@pytest.mark.parametrize("how", ["exit", "destroy", "call"])
def test_a_child_that_ends(fresh: Fresh, how: str) -> None:
    assert fresh.run(fork_and_leave, how) == [0, 0]
