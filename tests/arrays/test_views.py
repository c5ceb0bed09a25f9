"""Arrays of any library are read in place, and what cannot be read or written is told."""

from __future__ import annotations

import array
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamcomm.arrays.extents import overlap
from dreamcomm.arrays.views import view_of

PLAIN = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


class Producer:
    """Speaks DLPack alone."""

    def __init__(self, elements: Any, *, old: bool = False) -> None:
        self.elements, self.old = elements, old
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **how: Any) -> Any:
        self.asked.append(how)
        if self.old and how:
            raise TypeError("an older producer")
        return self.elements.__dlpack__(**how)


def named(name: str) -> np.ndarray[Any, Any]:
    return np.arange(6).astype(name).reshape(2, 3)


@pytest.mark.parametrize("name", PLAIN)
def test_numpy_is_read_in_place(name: str) -> None:
    elements = named(name)
    found = view_of(elements, "array")
    assert found.why_constant == ""
    assert str(found.tensor.dtype) == f"torch.{name}"
    found.tensor[1, 2] = 1
    assert elements[1, 2] == 1
    made = found.like(found.tensor.clone())
    assert type(made) is np.ndarray
    assert made.dtype == elements.dtype
    assert np.array_equal(made, elements)


def test_a_read_only_array_is_read_in_place_and_not_written() -> None:
    elements = named("float32")
    elements.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = view_of(elements, "array")
    assert found.why_constant == "it is read-only"
    assert found.tensor.data_ptr() == elements.ctypes.data


@pytest.mark.parametrize(
    "index", [np.s_[::-1], np.s_[:, ::-2], np.s_[::2], np.s_[:, 1:], np.s_[:0]]
)
def test_strides(index: Any) -> None:
    elements = named("float64")[index]
    found = view_of(elements, "array")
    assert np.array_equal(found.tensor.numpy(), elements)
    assert not found.why_constant
    found.tensor.fill_(7)
    if found.written is not None:
        found.written()
    assert np.array_equal(elements, np.full_like(elements, 7))


def test_a_field_of_records_is_copied() -> None:
    records = np.zeros(3, [("a", "i1"), ("b", "f4")])
    records["b"] = [1, 2, 3]
    found = view_of(records["b"], "array")
    assert found.tensor.tolist() == [1, 2, 3]
    found.tensor.fill_(7)
    assert found.written is not None
    found.written()
    assert records.tolist() == [(0, 7), (0, 7), (0, 7)]


@pytest.mark.parametrize(
    "value", [array.array("d", [1, 2, 3]), bytearray(b"abc"), memoryview(b"abc")]
)
def test_buffers(value: Any) -> None:
    found = view_of(value, "array")
    assert found.tensor.tolist() == list(value)
    assert (found.why_constant == "") == (not memoryview(value).readonly)
    made = found.like(found.tensor.clone())
    assert list(made) == list(value)
    assert isinstance(made, array.array) == isinstance(value, array.array)


def test_a_buffer_of_two_dimensions() -> None:
    view = memoryview(bytearray(24)).cast("i", (2, 3))
    made = view_of(view, "array").like(torch.arange(6, dtype=torch.int32).view(2, 3))
    assert made.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("old", [False, True])
def test_dlpack(old: bool) -> None:
    elements = named("int64")
    producer = Producer(elements, old=old)
    found = view_of(producer, "array")
    assert found.tensor.data_ptr() == elements.ctypes.data
    assert producer.asked[0]["max_version"] >= (1, 0)
    assert found.why_constant == ("it is read-only" if old else ""), "an old one cannot say it"
    elements.setflags(write=False)
    assert view_of(Producer(elements), "array").why_constant == "it is read-only"


def test_dlpack_with_a_negative_stride() -> None:
    """torch.from_dlpack ends the process here."""
    elements = named("float32")[::-1]
    assert np.array_equal(view_of(Producer(elements), "array").tensor.numpy(), elements)


def test_arrays_that_never_change() -> None:
    kind = type("Array", (Producer,), {"__module__": "jaxlib._jax"})
    assert view_of(kind(named("float32")), "x").why_constant == "arrays of jaxlib never change"


def test_jax() -> None:
    numbers = pytest.importorskip("jax.numpy")
    elements = numbers.arange(4, dtype=numbers.bfloat16)
    found = view_of(elements, "array")
    assert found.tensor.dtype == torch.bfloat16
    assert found.why_constant
    assert type(found.like(found.tensor.clone())) is type(elements)


def test_types_of_ml_dtypes() -> None:
    types = pytest.importorskip("ml_dtypes")
    elements = np.arange(4).astype(types.bfloat16)
    found = view_of(elements, "array")
    assert found.tensor.dtype == torch.bfloat16
    assert found.tensor.tolist() == [0, 1, 2, 3]
    assert found.like(found.tensor.clone()).dtype == elements.dtype


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (np.zeros(2, ">f4"), ValueError, "x: elements of type >f4 are in another byte order"),
        (np.zeros(2, object), TypeError, "x: no collective has elements of type object"),
        (np.zeros(2, [("a", "i4")]), TypeError, "x: no collective has elements"),
        (
            np.zeros(2, "datetime64[s]"),
            TypeError,
            "x: no collective has elements of type datetime64",
        ),
        (np.zeros(2, "U3"), TypeError, "x: no collective has elements of type <U3"),
        (np.zeros(2, np.longdouble), TypeError, "x: no collective has elements of type float128"),
        ([1, 2], TypeError, "x: expected an array .* got list"),
        (3.0, TypeError, "x: expected an array .* got float"),
    ],
)
def test_what_is_refused(value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        view_of(value, "x")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4),
)
def test_overlap(dimensions: list[tuple[int, int]]) -> None:
    """It may only be wrong by taking elements that are apart for some that overlap."""
    sizes, strides = [size for size, _ in dimensions], [stride for _, stride in dimensions]
    places = {0: 1}
    for size, stride in dimensions:
        moved: dict[int, int] = {}
        for place, count in places.items():
            for index in range(size):
                moved[place + index * stride] = moved.get(place + index * stride, 0) + count
        places = moved
    tensor = torch.empty(200).as_strided(sizes, strides)
    if max(places.values()) > 1:
        assert overlap(view_of(tensor, "x"))


def test_usual_tensors_do_not_overlap() -> None:
    base = torch.empty(4, 6)
    for one in (base, base.t(), base[::2, ::3], base[:0], base[1], torch.empty(())):
        assert not overlap(view_of(one, "x"))
    assert overlap(view_of(base[:1].expand(3, 6), "x"))
