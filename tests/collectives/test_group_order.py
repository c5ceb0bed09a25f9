"""Groups that ranks make in different orders: torch names them by their number alone."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import dreamcomm
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
        assert "set up the same group differently: ranks=" in text, text
        assert "ranks=0/1" in text, text
        assert "ranks=0/2" in text, text
        assert "fixed_order" not in text, text
        assert "use_local_synchronization=True" in text, text


NONE = "no error"
SOON = 2.5  # seconds, of which two are for two looks at a busy store; 10 is the timeout


def make_both(groups: list[list[int]], orders: list[list[int]]) -> tuple[str, float]:
    """In the rank's own order; the error, and after how long it came. Nobody ends before that."""
    begin = time.monotonic()
    error = error_of(lambda: [dist.new_group(groups[n]) for n in orders[dist.get_rank()]])
    seconds = time.monotonic() - begin
    store = _get_default_store()
    store.set(f"told {dist.get_rank()}", "")
    store.wait([f"told {rank}" for rank in range(dist.get_world_size())], timedelta(seconds=30))
    return error, seconds


CASES = {
    "they meet where a third rank is in neither": ([[0, 1], [0, 2]], [[0, 1], [1, 0], [1, 0]]),
    "of other sizes": ([[0, 1], [0, 1, 2]], [[0, 1], [1, 0], [1, 0]]),
    "none of them meet": ([[0, 1], [2, 3]], [[0, 1], [1, 0], [1, 0], [1, 0]]),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_hear_soon_that_their_orders_differ(
    fresh: Fresh, case: str, slack: float
) -> None:
    groups, orders = CASES[case]
    found = fresh.run(make_both, groups, orders, world=len(orders))
    told = [(error, seconds) for error, seconds in found if error != NONE]
    # Ranks 2 and 3 may have come before rank 0, and have met.
    assert len(told) == len(found) or (len(found) == 4 and [r[0] for r in found[2:]] == [NONE] * 2)
    for error, seconds in told:
        differ = "the ranks of the job make groups in different orders" in error
        assert differ or "set up the same group differently" in error, error
        assert seconds < SOON + slack, (seconds, error)


def fail_and_go_on() -> list[str]:
    """Options that differ are no matter of orders, and what comes after that is made."""
    options = dreamcomm.Options()
    options.fixed_order = dist.get_rank() == 0
    failed = error_of(lambda: dist.new_group([0, 1], pg_options=options))
    if dist.get_rank() == 1:
        time.sleep(1.5)  # the others look at what it has posted
    group = dist.new_group([0, 1, 2])
    data = torch.ones(1)
    dist.all_reduce(data, group=group)
    return [failed, str(data.item())]


def test_ranks_that_have_failed_to_make_a_group_make_others(fresh: Fresh) -> None:
    (first, sum_0), (second, sum_1), (none, sum_2) = fresh.run(fail_and_go_on, world=3)
    assert "set up the same group differently" in first
    assert "set up the same group differently" in second
    assert none == NONE
    assert (sum_0, sum_1, sum_2) == ("3.0", "3.0", "3.0")


def make_after_own(own: list[list[list[int]]], members: list[int]) -> str:
    """Makes groups of its own, then one with the others; each by its members alone."""

    def make_all() -> None:
        for ranks in [*own[dist.get_rank()], members]:
            dist.new_group(ranks, use_local_synchronization=True)

    return error_of(make_all)


def told_in_time(fresh: Fresh, own: list[list[list[int]]], members: list[int]) -> list[str]:
    """The errors of all ranks, which have them long before the 30 s of the group."""
    return fresh.run(make_after_own, own, members, world=len(own), timeout=20.0)


def test_ranks_in_different_numbers_of_groups_hear_that_the_names_differ(fresh: Fresh) -> None:
    found = told_in_time(fresh, [[[0]], []], [0, 1])
    names = [set(re.findall(r"[0-9a-f]{40}", text)) for text in found]
    assert any(len(both) == 2 for both in names), found
    for text in found:
        assert "different names" in text, text
        assert "use_local_synchronization=True" in text, text


def test_members_alone_that_make_groups_in_different_orders_hear_it(fresh: Fresh) -> None:
    """Rank 0 waits in the group of three for rank 1, which waits for it in that of two."""
    found = told_in_time(fresh, [[], [[0, 1]], []], [0, 1, 2])
    for text in found:
        assert "rank 0" in text, text
        assert "rank 1" in text, text
        assert "Connection closed" not in text, text  # nobody is lost
    assert any("must make them in one order" in text for text in found), found


def make_often() -> list[float]:
    """Two groups of the same members at a time; later ones get the names of earlier ones."""
    sums = []
    for turn in range(3):
        groups = [dist.new_group([0, 1], use_local_synchronization=True) for _ in range(2)]
        for group in groups:
            data = torch.ones(1)
            dist.all_reduce(data, group=group)
            sums.append(data.item())
        if dist.get_rank() == turn % 2:
            time.sleep(1.2)  # the other one looks at what this one posted before
        dist.destroy_process_group(groups[1])
    return sums


def test_groups_of_the_same_members_are_made_one_after_the_other(fresh: Fresh) -> None:
    assert fresh.run(make_often) == [[2.0] * 6] * 2
