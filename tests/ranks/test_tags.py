"""Nobody takes another's tags."""

from __future__ import annotations

import itertools

import pytest

from dreamcomm.ranks import tags
from dreamcomm.ranks.tags import UNIT, TagRange

RANGES = {name: one for name, one in vars(tags).items() if isinstance(one, TagRange)}
USERS = range(1 << 20)
HIGHEST = (1 << 31) - 1  # a tag is an int


def test_no_ranges_overlap() -> None:
    assert set(RANGES) <= set(tags.__all__)
    for (one, a), (other, b) in itertools.combinations(RANGES.items(), 2):
        assert a.end <= b.first or b.end <= a.first, (one, other)


@pytest.mark.parametrize("name", RANGES)
def test_a_range_is_none_of_the_users(name: str) -> None:
    one = RANGES[name]
    assert one.first >= USERS.stop
    assert one.end <= HIGHEST


@pytest.mark.parametrize("name", RANGES)
def test_a_drawn_unit_is_of_the_range(name: str) -> None:
    one = RANGES[name]
    for _ in range(100):
        tag = one.drawn()
        assert one.first <= tag <= one.end - UNIT
        assert (tag - one.first) % UNIT == 0
