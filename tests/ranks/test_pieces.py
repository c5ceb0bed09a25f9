"""Runs and pieces have each tensor or element once, and flat elements are those of the memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dreamcomm.ranks.pieces import (
    Part,
    as_placed,
    by_kind,
    cut,
    in_memory_order,
    is_dense,
    runs,
    views,
)

SIZES = st.lists(st.integers(0, 20), max_size=8)


def test_the_drawing() -> None:
    found = list(cut(enumerate([11, 4, 5, 19]), 8))
    assert found == [
        (Part(0, 0, 8),),
        (Part(0, 8, 11), Part(1, 0, 4), Part(2, 0, 1)),
        (Part(2, 1, 5), Part(3, 0, 4)),
        (Part(3, 4, 12),),
        (Part(3, 12, 19),),
    ]
    tensors = [torch.empty(numel, dtype=torch.uint8) for numel in (11, 4, 5, 19)]
    assert list(runs(tensors, 11)) == [[0], [1, 2], [3]]


@given(SIZES, st.integers(1, 30))
def test_pieces_have_each_element_once_and_in_order(sizes: list[int], most: int) -> None:
    pieces = list(cut(enumerate(sizes), most))
    found = [(p.tensor, at) for piece in pieces for p in piece for at in range(p.begin, p.end)]
    assert found == [(number, at) for number, numel in enumerate(sizes) for at in range(numel)]
    totals = [sum(part.numel for part in piece) for piece in pieces]
    assert all(total == most for total in totals[:-1])
    assert all(0 < total <= most for total in totals)


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=8), st.integers(1, 100))
def test_runs_have_each_tensor_once(given_: list[tuple[int, bool]], most: int) -> None:
    tensors = [
        torch.empty(numel, dtype=torch.float64 if wide else torch.float32) for numel, wide in given_
    ]
    found = list(runs(tensors, most))
    assert sorted(number for run in found for number in run) == list(range(len(tensors)))
    for run in found:
        assert run == sorted(run)
        assert len({tensors[number].dtype for number in run}) == 1
        assert len(run) == 1 or sum(tensors[number].nbytes for number in run) <= most


def test_kinds_are_dtypes_and_devices() -> None:
    tensors = [
        torch.empty(1),
        torch.empty(1, dtype=torch.float64),
        torch.empty(1, device="meta"),
        torch.empty(2),
    ]
    assert by_kind([3, 2, 1, 0], tensors) == [[3, 0], [2], [1]]


DENSE = {
    "contiguous": torch.randn(2, 3, 4),
    "transposed": torch.randn(4, 3).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a part of a row": torch.randn(40)[7:19].view(3, 4),
    "scalar": torch.randn(()),
    "empty": torch.empty(0, 3),
    "one row": torch.randn(5, 6)[2:3],
}


@pytest.mark.parametrize("name", DENSE)
def test_elements_of_a_dense_tensor_lie_in_a_row(name: str) -> None:
    one = DENSE[name]
    assert is_dense(one)
    flat = in_memory_order(one)
    assert flat.shape == (one.numel(),)
    assert flat.data_ptr() == one.data_ptr()
    assert torch.equal(as_placed(flat, one), one)
    moved = torch.cat([torch.zeros(3), flat])[3:]
    assert torch.equal(as_placed(moved, one), one)


@pytest.mark.parametrize("one", [torch.randn(4, 6)[:, ::2], torch.randn(3).expand(2, 3)])
def test_gaps_and_repeats_are_not_dense(one: Tensor) -> None:
    assert not is_dense(one)


def test_views_have_the_shapes() -> None:
    flat = torch.arange(10)
    found = views(flat, [(2, 3), (), (0, 4), (3,)])
    assert [one.tolist() for one in found] == [[[0, 1, 2], [3, 4, 5]], 6, [], [7, 8, 9]]
    assert all(one.untyped_storage().data_ptr() == flat.data_ptr() for one in found)
