"""Which tensors are one memory, and which overlap in part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dreamcomm._torch.overlap import same_memory


def groups(*tensors: torch.Tensor) -> list[list[int]]:
    return same_memory([(f"t{number}", one) for number, one in enumerate(tensors)], "a test")


def test_tensors_of_one_memory_are_a_group() -> None:
    first, other = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    tied = nn.Parameter(torch.ones(3, 4))
    tied.data = first.data
    assert groups(first, other, tied, first) == [[0, 2, 3], [1]]


def test_rows_and_columns_of_one_matrix_stand_apart() -> None:
    whole = torch.ones(4, 6)
    assert groups(whole[:2], whole[2:]) == [[0], [1]]
    assert groups(whole[:, :3], whole[:, 3:]) == [[0], [1]]
    assert groups(whole[::2], whole[1::2]) == [[0], [1]]


def test_strides_of_single_rows_say_nothing() -> None:
    whole = torch.ones(4)
    assert groups(whole[None], whole.as_strided((1, 4), (9, 1))) == [[0, 1]]


def test_what_has_no_memory_stands_alone() -> None:
    sparse = torch.eye(3).to_sparse()
    assert groups(
        torch.empty(0), torch.empty(0), torch.empty(3, device="meta"), sparse, sparse
    ) == [[0], [1], [2], [3, 4]]


@pytest.mark.parametrize(
    "view",
    [
        lambda whole: whole.t(),
        lambda whole: whole[1:],
        lambda whole: whole[:, 2:3],
        lambda whole: whole.reshape(-1),
        lambda whole: whole.view(torch.int32),
        lambda whole: torch.view_as_complex(whole.view(4, 2, 2)),
    ],
)
def test_partial_overlap_is_refused_by_name(view) -> None:
    whole = torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"a test: 't0' and 't1' overlap in memory"):
        groups(whole, view(whole))


@given(st.data())
def test_equals_a_comparison_of_all_elements(data: st.DataObject) -> None:
    storage = torch.zeros(16)
    numbers = st.integers(0, 3)
    views = []
    for _ in range(2):
        shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
        strides = data.draw(st.tuples(numbers, numbers))
        views.append(storage.as_strided(shape, strides, data.draw(st.integers(0, 2))))
    own = [
        sorted(torch.arange(16).as_strided(v.shape, v.stride(), v.storage_offset()).flatten())
        for v in views
    ]
    shared = {int(one) for one in own[0]} & {int(one) for one in own[1]}
    try:
        found = groups(*views)
    except ValueError:
        assert shared
    else:
        assert found == [[0, 1]] or not shared
