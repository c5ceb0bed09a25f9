"""Arrays of any layout in memory have NumPy's results, and nothing beside them is written."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dreamcomm import Communicator
from helpers.pool import Pool

WORLD = 2
VERBS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
TYPES = ("uint8", "int16", "float32", "int64", "complex64")
KINDS = ("numpy", "torch", "memoryview")
pytestmark = pytest.mark.beyond_gloo("calls dreamcomm's backend")


class Dimension(NamedTuple):
    """How elements of a dimension lie in memory.

    Attributes:
        step: between two of them; negative: backwards.
        before, after: elements around them.
    """

    step: int
    before: int
    after: int


class Layout(NamedTuple):
    """Where an array lies.

    Attributes:
        dimensions: for each of the array's.
        order: of the dimensions in memory.
        offset: bytes before the first.
        item: bytes that an element takes, more than it has.
        is_constant: the array is read-only.
        kind: of the array, where it can have such a layout; else NumPy's.
    """

    dimensions: tuple[Dimension, ...]
    order: tuple[int, ...]
    offset: int
    item: int
    is_constant: bool
    kind: str


class Case(NamedTuple):
    """A call.

    Attributes:
        shape: of the array.
        arrays: layouts of the ranks' arrays.
        outs: layouts of the ranks' ``out``; None: a new one, or in place.
    """

    verb: str
    dtype: str
    shape: tuple[int, ...]
    arrays: tuple[Layout, ...]
    outs: tuple[Layout | None, ...]
    in_place: bool
    asynchronous: bool
    seed: int


class Placed:
    """An array in memory of its own, whose other bytes are known.

    Args:
        elements: that it has.
    """

    def __init__(self, layout: Layout, elements: NDArray[Any]) -> None:
        lengths = [
            one.before + max((count - 1) * abs(one.step) + 1, 0) + one.after
            for one, count in zip(layout.dimensions, elements.shape, strict=True)
        ]
        shape = [lengths[one] for one in layout.order]
        kind = elements.dtype
        # Fewer: see test_strides_that_do_not_count.
        is_some = elements.size > 1
        item = kind.itemsize + (layout.item if is_some else 0)
        record = np.dtype({"names": ["x"], "formats": [kind], "offsets": [0], "itemsize": item})
        size = layout.offset + int(np.prod(shape, dtype=int)) * item
        self.memory = np.full(size + 16, 0x5A, "u1")
        whole: NDArray[Any] = np.ndarray(shape, record, self.memory.data, layout.offset)
        back = np.argsort(np.array(layout.order, int))
        view = whole["x"].transpose(back)
        for axis, (one, count) in enumerate(zip(layout.dimensions, elements.shape, strict=True)):
            end = one.before + max((count - 1) * abs(one.step) + 1, 0)
            index = [slice(None)] * view.ndim
            index[axis] = slice(one.before, end, abs(one.step))
            view = view[tuple(index)]
            if one.step < 0 and is_some and count > 1:
                index[axis] = slice(None, None, -1)
                view = view[tuple(index)]
        assert view.shape == elements.shape
        view[...] = elements
        self.view: NDArray[Any] = view
        self.array = self._as_given(layout)

    def _as_given(self, layout: Layout) -> Any:
        item = self.view.itemsize
        buffer: Any = self.view
        if layout.kind == "torch" and all(
            one >= 0 and one % item == 0 for one in self.view.strides
        ):
            return torch.from_numpy(self.view)
        if layout.is_constant:
            self.view.setflags(write=False)
        memory = memoryview(buffer)
        # Others: see test_buffers_that_cast_does_not_make.
        is_plain = "=" not in memory.format
        return memory if layout.kind == "memoryview" and is_plain else self.view


def own(case: Case, rank: int) -> NDArray[Any]:
    random = np.random.default_rng(case.seed + rank)
    made: NDArray[Any] = random.integers(0, 50, case.shape).astype(case.dtype)
    return np.asarray(made + made.dtype.type(2j) if case.dtype == "complex64" else made)


def expected_of(case: Case, rank: int) -> NDArray[Any]:
    everyone = [own(case, one) for one in range(WORLD)]
    total: NDArray[Any] = everyone[0] + everyone[1]
    if case.verb == "all_gather":
        return np.concatenate([np.atleast_1d(one) for one in everyone])
    if case.verb == "reduce_scatter":
        return total[rank * len(total) // 2 : (rank + 1) * len(total) // 2]
    return np.asarray(total) if case.verb == "all_reduce" else everyone[1]


def called(comm: Communicator, case: Case, array: Any, out: Any) -> Any:
    how: dict[str, Any] = {} if out is None else {"out": out}
    if case.verb == "broadcast":
        how["src"] = 1
    found = getattr(comm, case.verb)(array, async_op=case.asynchronous, **how)
    return found.wait() if case.asynchronous else found


def elements_of(found: Any) -> NDArray[Any]:
    return found.numpy() if isinstance(found, torch.Tensor) else np.asarray(found)


def check(comm: Communicator, case: Case) -> None:
    rank = comm.rank
    given, expected = own(case, rank), expected_of(case, rank)
    layout, into = case.arrays[rank], case.outs[rank]
    placed = Placed(layout, given)
    if case.in_place:
        found = called(comm, case, placed.array, placed.array)
        assert found is placed.array
        assert placed.memory.tobytes() == Placed(layout, expected).memory.tobytes()
        return
    before = placed.memory.tobytes()
    if into is None:
        found = called(comm, case, placed.array, None)
        assert type(found) is type(placed.array)
    else:
        target = Placed(into, np.full_like(expected, 7))
        found = called(comm, case, placed.array, target.array)
        assert found is target.array
        assert target.memory.tobytes() == Placed(into, expected).memory.tobytes()
    assert placed.memory.tobytes() == before
    result = elements_of(found)
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    assert result.tobytes() == expected.tobytes()


def run(cases: list[Case]) -> None:
    comm = Communicator.from_group()
    for case in cases:
        try:
            check(comm, case)
        except (Exception, pytest.fail.Exception) as error:
            raise AssertionError(f"{case}: {error!r}") from error
    total = np.ones(2)
    comm.all_reduce(total, out=total)
    assert total.tolist() == [dist.get_world_size()] * 2


@st.composite
def layouts(draw: st.DrawFn, count: int, *, is_out: bool) -> Layout:
    steps = st.sampled_from((1, 1, 1, 2, 3, -1, -2))
    few = st.integers(0, 2)
    return Layout(
        tuple(Dimension(draw(steps), draw(few), draw(few)) for _ in range(count)),
        tuple(draw(st.permutations(range(count)))),
        draw(st.sampled_from((0, 0, 8, 16, 3))),
        draw(st.sampled_from((0, 0, 0, 8, 1))),
        not is_out and draw(st.booleans()),
        draw(st.sampled_from(KINDS)),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    verb = draw(st.sampled_from(VERBS))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    if verb == "reduce_scatter":
        shape = [2 * draw(st.integers(0, 3)), *shape]
    in_place = verb in ("all_reduce", "broadcast") and draw(st.booleans())
    ranks = len(shape) or (1 if verb == "all_gather" else 0)
    outs = st.none() | layouts(ranks, is_out=True)
    return Case(
        verb,
        draw(st.sampled_from(TYPES)),
        tuple(shape),
        tuple(draw(layouts(len(shape), is_out=in_place)) for _ in range(WORLD)),
        tuple(None if in_place else draw(outs) for _ in range(WORLD)),
        in_place,
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


def test_layouts(pool: Pool, soak: bool) -> None:
    found: Counter[Any] = Counter()

    # Without shrinking: an example fails in other processes. The message names the case.
    @settings(
        max_examples=1000 if soak else 40,
        derandomize=not soak,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(cases(), min_size=10, max_size=30))
    def check_all(drawn: list[Case]) -> None:
        pool.run(run, drawn, world=WORLD)
        for case in drawn:
            found[case.verb, case.in_place] += 1
            found["empty"] += 0 in case.shape
            found["number"] += case.shape == ()
            found["backwards"] += any(
                one.step < 0 for out in case.outs if out is not None for one in out.dimensions
            )

    check_all()
    assert all(found[verb, False] > 20 for verb in VERBS)
    assert all(found[what] > 20 for what in ("empty", "number", "backwards"))
    assert found["all_reduce", True] > 20


def uncounted(name: str) -> str:
    """All-reduces an array whose strides no element uses; returns the error."""
    comm = Communicator.from_group()
    records = np.zeros(1, [("a", "i1"), ("b", "f8")])
    arrays: dict[str, NDArray[Any]] = {
        "empty": np.zeros((2, 3))[:0, ::-1],
        "one": np.ones(1)[::-1],
        "one row": np.ones((1, 3))[::-1],
        "a record": records["b"],
    }
    array = arrays[name]
    try:
        found = comm.all_reduce(array)
        assert comm.all_reduce(array, out=array) is array
    except ValueError as error:
        return str(error)
    assert found.tolist() == array.tolist()
    return ""


@pytest.mark.parametrize("name", ["empty", "one", "one row", "a record"])
def test_strides_that_do_not_count(pool: Pool, name: str) -> None:
    assert pool.run(uncounted, name) == [""] * WORLD
