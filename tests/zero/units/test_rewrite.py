"""One rank writes whole parameters, while the others wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dreamcomm import zero
from dreamcomm.zero.units.parameters import region
from helpers.pool import Pool
from zero.units.sharding import made, shard, sharded, weights

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def after_late_writes(slow: int) -> list[float]:
    """One rank is late with what it writes to its own rows before the rewrite."""
    module = sharded("mlp")
    if dist.get_rank() == slow:
        time.sleep(0.2)
    with torch.no_grad():
        for one in module.parameters():
            one.to_local().fill_(1.0)
    with module.rewrite() as writes:
        if writes:
            for one in module.parameters():
                one.fill_(2.0)
    return [value for one in weights(module) for value in one.unique().tolist()]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rewrite_waits_for_what_owners_write(pool: Pool, slow: int) -> None:
    for values in pool.run(after_late_writes, slow, world=2):
        assert set(values) == {2.0}


@contextmanager
def late_rows(slow: int) -> Iterator[None]:
    """One rank is late with its rows of a new region."""

    def later(*given: Any) -> Any:
        if dist.get_rank() == slow:
            time.sleep(0.05)
        return layout(*given)

    layout = region.shard_layout
    with mock.patch.object(region, "shard_layout", later):
        yield


def initialized_in_late_rows(slow: int) -> bool:
    with torch.device("meta"):
        module = shard(made("mlp"))
    module.to_empty(device="cpu")

    def fill(whole: torch.nn.Module) -> None:
        for one in whole.parameters():
            one.normal_()

    with late_rows(slow):
        zero.initialize(module, fill, seed=3)
    torch.manual_seed(3)
    return all(torch.equal(one, torch.empty_like(one).normal_()) for one in weights(module))


@pytest.mark.parametrize("slow", [0, 1])
def test_values_are_initialized_in_memory_that_all_ranks_have_taken(pool: Pool, slow: int) -> None:
    assert pool.run(initialized_in_late_rows, slow, world=2) == [True, True]


def with_other_calls() -> str:
    module = sharded("mlp")
    try:
        if dist.get_rank() == 0:
            with module.rewrite():
                pass
        else:
            module.unshard()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_all_rewrite_have_an_error(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(with_other_calls, world=2)):
        assert text.startswith(f"rank {rank}: fully_shard: the ranks made different calls: ")
        assert "call is rewrite() on rank 0, and a forward pass or unshard() on rank 1" in text
