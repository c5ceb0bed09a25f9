"""Plans of buckets: each gradient once, in order, no larger than asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dreamcomm.buckets.plan import ParameterInfo, Plan, agreed_order, plan_buckets

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[ParameterInfo]:
    count = draw(st.integers(1, 30))
    return [
        ParameterInfo(
            f"p{number}",
            draw(st.integers(0, 5000)),
            draw(st.sampled_from(DTYPES)),
            CPU,
            draw(st.integers(0, 9)) == 0,
            draw(st.sampled_from((0.0, 0.5))),
        )
        for number in range(count)
    ]


@given(parameter_lists(), st.integers(1, 20_000), st.integers(1, 20_000), st.randoms())
def test_every_gradient_is_in_one_bucket_of_its_kind(
    infos: list[ParameterInfo], cap: int, first: int, random: object
) -> None:
    order = list(range(len(infos)))
    random.shuffle(order)  # type: ignore[attr-defined]
    unseen = order[len(order) - len(order) // 4 :]
    plan = plan_buckets(infos, order=order, unseen=unseen, cap_bytes=cap, first_bytes=first)
    assert sorted(member for bucket in plan.buckets for member in bucket.members) == sorted(order)
    place = {number: at for at, number in enumerate(order)}
    lasts = []
    for number, bucket in enumerate(plan.buckets):
        members = [infos[member] for member in bucket.members]
        assert {(one.dtype, one.device, one.sparse) for one in members} == {
            (bucket.dtype, bucket.device, bucket.sparse)
        }
        assert bucket.sparse or len({one.factor for one in members}) == 1
        places = [place[member] for member in bucket.members]
        assert places == sorted(places)
        lasts.append(places[-1])
        assert bucket.nbytes == sum(one.nbytes for one in members)
        # A bucket is closed by the gradient that reaches the cap.
        most = max(cap, first) if number == 0 else cap
        assert bucket.sparse or sum(one.nbytes for one in members[:-1]) < max(most, first)
        assert len(members) == 1 or not bucket.sparse
        assert len({member in unseen for member in bucket.members}) == 1
    assert lasts == sorted(lasts)


def test_the_first_bucket_is_small_and_the_others_have_the_cap() -> None:
    infos = [ParameterInfo(f"p{number}", 250, torch.float32, CPU) for number in range(10)]
    plan = plan_buckets(infos, cap_bytes=4000, first_bytes=1500)
    assert plan.members() == [[9, 8], [7, 6, 5, 4], [3, 2, 1, 0]]
    assert plan_buckets(infos, cap_bytes=4000, caps=[1000, 2000]).members() == [
        [9],
        [8, 7],
        [6, 5, 4, 3],
        [2, 1, 0],
    ]


def test_a_plan_is_printed_as_a_table() -> None:
    infos = [
        ParameterInfo("head.weight", 1000, torch.float32, CPU),
        ParameterInfo("words", 10, torch.float32, CPU, sparse=True),
        ParameterInfo("head.bias", 10, torch.bfloat16, CPU),
    ]
    lines = str(plan_buckets(infos)).splitlines()
    assert lines[0].split() == [
        "bucket", "gradients", "bytes", "dtype", "device", "from", "...", "to",
    ]  # fmt: skip
    assert lines[1].split() == ["0", "1", "20", "bfloat16", "cpu", "head.bias"]
    assert "float32 (sparse)" in lines[2]
    assert lines[3].split() == ["2", "1", "4,000", "float32", "cpu", "head.weight"]
    assert str(Plan((), ())) == lines[0]


def test_a_wrong_order_is_named() -> None:
    infos = [ParameterInfo("a", 1, torch.float32, CPU)] * 2
    with pytest.raises(ValueError, match="each of 2 parameters once, got"):
        plan_buckets(infos, order=[0, 0])
    with pytest.raises(ValueError, match="caps of at least 1 byte"):
        plan_buckets(infos, cap_bytes=0)


def test_ranks_agree_on_the_first_ones_order() -> None:
    assert agreed_order([[2, 0], [3, 2]], 5) == ([2, 0, 3, 4, 1], [4, 1])
    assert agreed_order([[], [1, 0]], 2) == ([1, 0], [])
