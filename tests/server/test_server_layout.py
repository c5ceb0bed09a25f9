"""Which server has a parameter, and which message has an element: each exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dreamcomm.server.layout import PIECE_BYTES, Layout, TensorSpec, assign, difference
from dreamcomm.server.pieces import Gather, Scatter

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.just(""),
        st.lists(st.integers(0, 6), max_size=3).map(tuple),
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(SPECS, st.integers(1, 200))
def test_pieces_hold_each_element_once(specs: list[TensorSpec], piece_bytes: int) -> None:
    layout = Layout(specs, piece_bytes)
    seen: list[list[int]] = [[] for _ in specs]
    place = dict.fromkeys(layout.sizes, 0)
    assert layout.pieces, "a request without any message would have no answer"
    for piece in layout.pieces:
        assert piece.begin == place[piece.dtype]
        place[piece.dtype] = piece.end
        assert (piece.end - piece.begin) * piece.dtype.itemsize <= max(piece_bytes, 8)
        assert sum(part.end - part.begin for part in piece.parts) == piece.end - piece.begin
        for part in piece.parts:
            assert specs[part.tensor].dtype == piece.dtype
            assert part.begin < part.end
            seen[part.tensor] += range(part.begin, part.end)
    assert place == layout.sizes
    assert seen == [list(range(spec.numel)) for spec in specs]
    assert layout.nbytes == sum(spec.nbytes for spec in specs)


def tensors_of(specs: list[TensorSpec], transposed: bool) -> list[Tensor]:
    torch.manual_seed(0)
    made = []
    for spec in specs:
        if transposed and len(spec.shape) > 1:
            made.append(
                torch.randn(spec.shape[::-1]).to(spec.dtype).permute(*range(len(spec.shape))[::-1])
            )
        else:
            made.append(torch.randn(spec.shape).to(spec.dtype))
    return made


@settings(deadline=None)
@given(SPECS, st.integers(1, 200), st.booleans(), st.data())
def test_what_is_gathered_is_scattered(
    specs: list[TensorSpec], piece_bytes: int, transposed: bool, data: st.DataObject
) -> None:
    layout = Layout(specs, piece_bytes)
    given_tensors = tensors_of(specs, transposed)
    absent = data.draw(st.sets(st.integers(0, len(specs) - 1)))
    gather = Gather([None if n in absent else one for n, one in enumerate(given_tensors)])
    into = [torch.full_like(one, 7) for one in tensors_of(specs, not transposed)]
    flats = {dtype: torch.empty(size, dtype=dtype) for dtype, size in layout.sizes.items()}
    scatter = Scatter(into)
    for piece in layout.pieces:
        part = gather.get(piece)
        assert part.is_contiguous()
        assert part.dtype == piece.dtype
        flats[piece.dtype][piece.begin : piece.end] = part
        scatter.put(piece, part)
    for number, (one, other, view) in enumerate(
        zip(into, given_tensors, layout.views(flats), strict=True)
    ):
        wanted = torch.zeros_like(other) if number in absent else other
        assert torch.equal(one, wanted)
        assert torch.equal(view, wanted)


def test_a_large_tensor_is_sent_from_where_it_is() -> None:
    one = torch.randn(1_600_000)
    layout = Layout([TensorSpec("", (1_600_000,), torch.float32)])
    gather = Gather([one])
    parts = [gather.get(piece) for piece in layout.pieces]
    assert [part.nbytes for part in parts] == [PIECE_BYTES] * 3 + [6_400_000 - 3 * PIECE_BYTES]
    assert [part.data_ptr() - one.data_ptr() for part in parts] == [
        number * PIECE_BYTES for number in range(4)
    ]


def test_one_that_is_not_contiguous_is_copied_once() -> None:
    """And not for each of its pieces."""
    one = torch.randn(2000, 1800).t()
    layout = Layout([TensorSpec("", (1800, 2000), torch.float32)])
    gather = Gather([one])
    places = [gather.get(piece).data_ptr() for piece in layout.pieces]
    assert len(places) == 7
    assert [place - places[0] for place in places] == [n * PIECE_BYTES for n in range(7)]


@settings(deadline=None)
@given(SPECS, st.integers(1, 5))
def test_servers_share_parameters_by_bytes(specs: list[TensorSpec], servers: int) -> None:
    members = assign(specs, servers)
    assert len(members) == servers
    assert sorted(number for one in members for number in one) == list(range(len(specs)))
    assert all(one == sorted(one) for one in members)
    loads = [sum(specs[number].nbytes for number in one) for one in members]
    largest = max(spec.nbytes for spec in specs)
    assert max(loads) - min(loads) <= largest


def test_each_server_has_a_parameter_where_there_are_as_many() -> None:
    specs = [TensorSpec("", (4,), torch.float32) for _ in range(5)]
    assert assign(specs, 5) == [[0], [1], [2], [3], [4]]
    assert assign(specs, 2) == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize(
    ("server", "worker", "words"),
    [
        ([("a", (2,)), ("b", (3,))], [("a", (2,)), ("b", (3,))], ""),
        ([("a", (2,)), ("b", (3,))], [("", (2,)), ("", (3,))], ""),
        (
            [("a", (2,)), ("b", (3,))],
            [("a", (2,)), ("c", (3,))],
            "parameter 1 is b of float32 [3] on the server, and c of float32 [3] on the worker",
        ),
        ([("a", (2,))], [("a", (2, 1))], "parameter 0 is a of float32 [2] on the server"),
        ([("a", (2,))], [], "the server has 1 parameters, and the worker 0"),
    ],
    ids=["same", "no names", "name", "shape", "fewer"],
)
def test_the_first_difference_is_named(server: list, worker: list, words: str) -> None:  # type: ignore[type-arg]
    specs = [[TensorSpec(*one, torch.float32) for one in side] for side in (server, worker)]
    found = difference(*specs)
    assert words in found
    assert bool(words) == bool(found)
