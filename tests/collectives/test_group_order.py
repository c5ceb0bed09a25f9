"""Groups that ranks make in different orders: torch names them by their number alone."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Fresh
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("gloo waits, or adds up the wrong ranks")


def make_in_own_order(first: list[int], second: list[int], callers: list[int]) -> str:
    """Rank 0 makes the first one first; the error of the group that this rank makes first."""
    order = (first, second) if dist.get_rank() == 0 else (second, first)

    def make_and_use() -> None:
        group = dist.new_group(order[0], timeout=timedelta(seconds=1))
        dist.all_reduce(torch.ones(1), group=group)

    return error_of(make_and_use) if dist.get_rank() in callers else ""


def test_groups_of_other_ranks_name_both_sides_ranks(fresh: Fresh) -> None:
    """Both are group 1 of two ranks, and would work without a word, for the wrong ones."""
    found = fresh.run(make_in_own_order, [0, 1], [0, 2], [0, 2], world=3)
    assert found[1] == ""
    for text in (found[0], found[2]):
        assert text.startswith("DistBackendError: rank "), text
        assert "set up the same group differently: settings" in text, text
        assert "ranks=0/1" in text, text
        assert "ranks=0/2" in text, text


def test_groups_of_other_sizes_name_who_has_not_come(fresh: Fresh) -> None:
    """They do not meet; making a group waits for ten seconds at the least."""
    found = fresh.run(make_in_own_order, [0, 1], [0, 1, 2], [0, 1, 2], world=3)
    for rank, missing in ((0, 1), (1, 0), (2, 0)):
        words = f"rank {missing} has not come within the timeout of 10000 ms"
        assert words in found[rank], found[rank]
        assert "All ranks must make the group" in found[rank], found[rank]
