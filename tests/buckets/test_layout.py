"""How parameters are sharded: torch.chunk's and DTensor's rule, and each element owned once."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard

from dreamcomm.buckets.layout import RankRows, is_replicated, shard_layout, shard_rows, shard_shape

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
WORLDS = st.integers(1, 9)


def chunk_of(whole: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """What torch.chunk leaves to a rank; it makes fewer chunks where rows are few."""
    chunks = torch.chunk(whole, world)
    return chunks[rank] if rank < len(chunks) else whole[:0]


@given(st.lists(SHAPES, max_size=5), WORLDS)
def test_each_element_has_one_owner_and_keeps_its_order(
    shapes: list[tuple[int, ...]], world: int
) -> None:
    layouts = [shard_layout(shapes, world, rank) for rank in range(world)]
    for number, shape in enumerate(shapes):
        owned = [
            range(piece.offset, piece.offset + piece.numel)
            for piece in (layout[number] for layout in layouts)
        ]
        if is_replicated(shape):
            assert owned == [range(1)] * world
        else:
            every = [element for elements in owned for element in elements]
            assert every == list(range(math.prod(shape)))
    for layout in layouts:
        assert len(layout) == len(shapes)
        place = 0
        for piece in layout:
            assert piece.place == place
            place += piece.numel


@given(SHAPES, WORLDS)
def test_a_shard_is_torch_chunks(shape: tuple[int, ...], world: int) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for rank in range(world):
        [piece] = shard_layout([shape], world, rank)
        wanted = whole if is_replicated(shape) else chunk_of(whole, world, rank)
        flat = whole.reshape(-1)[piece.offset : piece.offset + piece.numel]
        shard = flat.view(shard_shape(shape, world, rank))
        assert shard.shape == wanted.shape
        assert torch.equal(shard, wanted)
        if shape:
            assert (piece.begin, piece.end) == shard_rows(shape[0], world, rank)
            assert torch.equal(whole[piece.begin : piece.end], wanted)


@given(st.integers(0, 1000), st.integers(1, 100), st.data())
def test_rows_are_dtensors(rows: int, world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    begin, end = shard_rows(rows, world, rank)
    size, offset = Shard.local_shard_size_and_offset(rows, world, rank)
    assert end - begin == size
    assert begin == offset or size == 0


@given(SHAPES, WORLDS)
def test_sizes_are_dtensors(shape: tuple[int, ...], world: int) -> None:
    for rank in range(world):
        local = shard_shape(shape, world, rank)
        if shape:
            size, _ = Shard.local_shard_size_and_offset(shape[0], world, rank)
            assert local == (size, *shape[1:])
        else:
            assert local == ()


def test_a_layout_by_hand() -> None:
    shapes = [(5, 2), (), (1, 3), (0, 4), (3,)]
    assert shard_layout(shapes, 2, 0) == [
        RankRows(0, 3, 0, 6, 0),
        RankRows(0, 1, 0, 1, 6),
        RankRows(0, 1, 0, 3, 7),
        RankRows(0, 0, 0, 0, 10),
        RankRows(0, 2, 0, 2, 10),
    ]
    assert shard_layout(shapes, 2, 1) == [
        RankRows(3, 5, 6, 4, 0),
        RankRows(0, 1, 0, 1, 4),
        RankRows(1, 1, 3, 0, 5),
        RankRows(0, 0, 0, 0, 5),
        RankRows(2, 3, 2, 1, 5),
    ]
    assert shard_layout([], 2, 1) == []


def test_middle_ranks_can_have_fewer_rows_and_the_last_none() -> None:
    assert [shard_rows(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert shard_shape((5, 3), 4, 3) == (0, 3)


def test_a_scalar_is_whole_and_one_row_is_not() -> None:
    assert is_replicated(())
    assert not is_replicated((1,))
    assert shard_shape((), 4, 3) == ()
    assert shard_shape((1,), 4, 3) == (0,)
    assert shard_shape(torch.Size([4, 2]), 4, 3) == (1, 2)


def test_bad_input_is_named() -> None:
    for world, rank, message in [
        (0, 0, "expected a world of at least 1 rank, got 0"),
        (2, 2, "expected a rank from 0 to 1, got 2"),
        (2, -1, "expected a rank from 0 to 1, got -1"),
    ]:
        with pytest.raises(ValueError, match=f"shard_rows: {message}"):
            shard_rows(1, world, rank)
        with pytest.raises(ValueError, match=f"shard_layout: {message}"):
            shard_layout([], world, rank)
        with pytest.raises(ValueError, match=f"shard_shape: {message}"):
            shard_shape((), world, rank)
    with pytest.raises(ValueError, match="expected at least 0 rows, got -1"):
        shard_rows(-1, 1, 0)
    wrong = re.escape("expected sizes of at least 0, got the shape (2, -3)")
    with pytest.raises(ValueError, match=wrong):
        shard_layout([(1,), (2, -3)], 1, 0)
    with pytest.raises(ValueError, match=wrong):
        shard_shape([2, -3], 1, 0)
    with pytest.raises(ValueError, match=wrong):
        is_replicated((2, -3))
