"""Packing and unpacking agree with torch's own operations, and refuse what they cannot do."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dreamcomm import ops

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((), (0,), (1,), (3, 5), (7,), (2, 0, 4), (1025,), (64, 33))

shapes = st.lists(st.sampled_from(SHAPES), max_size=12)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)


def make(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Tensors at odd places of their memory, with some numbers that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in shapes:
        numel = math.prod(shape)
        memory = torch.randn(numel + 1, generator=generator, dtype=torch.float64).to(dtype)
        if seed % 3 == 0 and numel > 4:
            memory[2:5] = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
        made.append(memory[1:].view(shape))
    return made


def flat(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in [torch.empty(0), *tensors]])


def computed_in(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in (one, other) else torch.float32


def rounded(value: Tensor, to: torch.dtype) -> Tensor:
    """Rounds once; torch takes float64 to 16 bits over float32, and may end beside the nearest."""
    found = value.to(to)
    for bound in (math.inf, -math.inf):
        beside = torch.nextafter(found, torch.full_like(found, bound))
        closer = (beside.double() - value).abs() < (found.double() - value).abs()
        found = torch.where(closer, beside, found)
    return found


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None)
@given(shapes, dtypes, dtypes, st.sampled_from((1.0, 0.5, -3.0, 1 / 3)), seeds)
def test_pack_is_multiply_and_cast(
    shapes: list[tuple[int, ...]], source: torch.dtype, to: torch.dtype, scale: float, seed: int
) -> None:
    tensors = make(shapes, source, seed)
    exact = computed_in(source, to)
    expected = rounded(flat(tensors, exact) * torch.tensor(scale, dtype=exact), to)
    out = torch.full(expected.shape, 7.0, dtype=to)
    done = ops.pack(tensors, out, scale=scale)
    assert_same(out, expected)
    # Without tensors there is nothing that would have a dtype.
    assert done.bytes_read == sum(t.nbytes for t in tensors)
    assert done.bytes_written == out.nbytes
    assert (done.squared_norm, done.finite) == (None, None)


@settings(deadline=None)
@given(shapes, dtypes, dtypes, st.sampled_from((1, 2, 3, 7)), st.sampled_from((1.0, 0.3)), seeds)
def test_unpack_is_divide_and_cast(
    shapes: list[tuple[int, ...]],
    source: torch.dtype,
    to: torch.dtype,
    divisor: int,
    factor: float,
    seed: int,
) -> None:
    buffer = flat(make(shapes, source, seed), source)
    exact = computed_in(source, to)
    expected = rounded(buffer.to(exact) / divisor * torch.tensor(factor, dtype=exact), to)
    tensors = [torch.full(shape, 7.0, dtype=to) for shape in shapes]
    done = ops.unpack(buffer, tensors, divisor=divisor, factor=factor, inspect=True)
    assert_same(flat(tensors, to), expected)
    assert (done.bytes_read, done.bytes_written) == (buffer.nbytes, expected.nbytes)
    assert done.finite == bool(expected.isfinite().all())
    assert done.squared_norm == pytest.approx(
        expected.double().square().sum().item(), rel=1e-12, nan_ok=True
    )


@settings(deadline=None)
@given(shapes, dtypes, st.sampled_from(DTYPES), seeds)
def test_the_residual_is_what_the_cast_took_away(
    shapes: list[tuple[int, ...]], source: torch.dtype, to: torch.dtype, seed: int
) -> None:
    tensors = make(shapes, source, seed)
    exact = computed_in(source, to)
    residual = torch.linspace(-1e-3, 1e-3, flat(tensors, exact).numel())
    value = flat(tensors, exact) * torch.tensor(0.7, dtype=exact) + residual.to(exact)
    expected = rounded(value, to)
    left = (value - expected.to(exact)).float()
    out = torch.empty(value.shape, dtype=to)
    ops.pack(tensors, out, scale=0.7, residual=residual)
    assert_same(out, expected)
    assert_same(residual, torch.where(left.isfinite(), left, 0.0))


@given(st.lists(st.integers(0, 3000), max_size=6), seeds)
@settings(deadline=None)
def test_the_squared_norm_does_not_depend_on_the_cuts(cuts: list[int], seed: int) -> None:
    buffer = torch.randn(3000, generator=torch.Generator().manual_seed(seed))
    places = sorted({0, *cuts, 3000})
    sizes = [end - begin for begin, end in pairwise(places)]
    whole = ops.unpack(buffer, [torch.empty(3000)], divisor=3, inspect=True)
    parts = ops.unpack(buffer, [torch.empty(n) for n in sizes], divisor=3, inspect=True)
    assert whole.squared_norm == parts.squared_norm


@pytest.mark.parametrize(("feedback", "expected"), [(False, 6), (True, 14)])
def test_bytes_per_element(feedback: bool, expected: int) -> None:
    tensors = [torch.randn(100), torch.randn(28)]
    wire, residual = torch.empty(128, dtype=torch.bfloat16), torch.zeros(128)
    done = ops.pack(tensors, wire, residual=residual if feedback else None)
    assert done.bytes_read + done.bytes_written == expected * 128
    done = ops.unpack(wire, tensors, inspect=True)
    assert done.bytes_read + done.bytes_written == 6 * 128


def test_a_tensor_may_lie_at_its_own_place() -> None:
    buffer = torch.randn(1000)
    expected = buffer / 3
    done = ops.unpack(buffer, list(buffer.split(300)), divisor=3, inspect=True)
    assert_same(buffer, expected)
    assert done.finite
    ops.pack(list(buffer.split(170)), buffer, scale=3.0)
    assert_same(buffer, expected * 3.0)


def test_leaves_that_require_gradients_are_written_as_without() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    ops.unpack(torch.tensor([1.0, 2.0, 3.0]), [leaf])
    assert leaf.tolist() == [1.0, 2.0, 3.0]
    assert leaf.is_leaf
    out = torch.zeros(3, dtype=torch.bfloat16)
    ops.pack([leaf], out)
    assert not out.requires_grad


def test_autograd_notices_that_memory_was_written() -> None:
    for write in (
        lambda t: ops.unpack(torch.ones(3), [t]),
        lambda t: ops.pack([torch.ones(3)], t),
        lambda t: ops.pack([torch.ones(3)], torch.empty(3), residual=t),
    ):
        leaf, saved = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
        product = (leaf * saved).sum()
        write(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_inference_tensors_are_written() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
        ops.unpack(torch.ones(2), [tensor])
        assert tensor.tolist() == [1.0, 1.0]


WRONG_BOTH: dict[str, tuple[Callable[[], tuple[list[Any], Any]], type[Exception], str]] = {
    "integers": (
        lambda: ([torch.zeros(3, dtype=torch.int32)], torch.zeros(3)),
        ValueError,
        r"expected 'tensors\[0\]' of type float32, float64, bfloat16 or float16, got int32",
    ),
    "mixed": (
        lambda: ([torch.zeros(2), torch.zeros(1).double()], torch.zeros(3)),
        ValueError,
        r"expected 'tensors\[1\]' of type float32 like the first tensor, got float64",
    ),
    "strided": (
        lambda: ([torch.zeros(3, 2).t()], torch.zeros(6)),
        ValueError,
        r"expected 'tensors\[0\]' to be contiguous, got shape \[2, 3\] with strides \[1, 2\]",
    ),
    "expanded flat side": (
        lambda: ([torch.zeros(3)], torch.zeros(1).expand(3)),
        ValueError,
        "to be contiguous",
    ),
    "numel": (
        lambda: ([torch.zeros(3), torch.zeros(2)], torch.zeros(4)),
        ValueError,
        "with 5 elements, as many as the tensors have together, got 4",
    ),
    "sparse": (
        lambda: ([torch.zeros(3).to_sparse()], torch.zeros(3)),
        ValueError,
        "to be dense, got a tensor of layout Sparse",
    ),
    "meta": (
        lambda: ([torch.zeros(3, device="meta")], torch.zeros(3)),
        ValueError,
        "on cpu or cuda, got a tensor on meta; no other device has these operations",
    ),
    "negated view": (
        lambda: ([torch._neg_view(torch.zeros(3))], torch.zeros(3)),
        ValueError,
        "a view that negates",
    ),
    "class of its own": (
        lambda: ([FakeTensorMode().from_tensor(torch.zeros(3))], torch.zeros(3)),
        ValueError,
        "to be a plain tensor, got one of a class with operations of its own",
    ),
    "zeros without memory": (
        lambda: ([torch._efficientzerotensor(3)], torch.zeros(3)),
        ValueError,
        "to have memory, got a tensor of zeros without any",
    ),
    "freed": (
        lambda: ([freed(3)], torch.zeros(3)),
        ValueError,
        "to have memory, got a tensor whose storage was given back",
    ),
    "not a list": (lambda: (torch.zeros(3), torch.zeros(3)), TypeError, r"got one; write \[it\]"),
    "no tensor": (
        lambda: ([None], torch.zeros(3)),
        TypeError,
        r"expected 'tensors\[0\]' to be a tensor, got NoneType",
    ),
    "no flat tensor": (lambda: ([torch.zeros(3)], [1.0]), TypeError, "to be a tensor, got list"),
}


def freed(numel: int) -> Tensor:
    tensor = torch.zeros(numel)
    tensor.untyped_storage().resize_(0)
    return tensor


def overlapping(shift: int) -> tuple[list[Tensor], Tensor]:
    memory = torch.zeros(8)
    return [memory[shift : shift + 4]], memory[:4]


@pytest.mark.parametrize("name", WRONG_BOTH)
@pytest.mark.parametrize("call", ["pack", "unpack"])
def test_wrong_arguments_are_named(call: str, name: str) -> None:
    arguments, error, message = WRONG_BOTH[name]
    tensors, single = arguments()
    with pytest.raises(error, match=f"^{call}: .*{message}"):
        ops.pack(tensors, single) if call == "pack" else ops.unpack(single, tensors)


@pytest.mark.parametrize("call", ["pack", "unpack"])
def test_overlapping_memory_is_refused(call: str) -> None:
    tensors, single = overlapping(1)
    with pytest.raises(ValueError, match=r"'tensors\[0\]' not to share memory with"):
        ops.pack(tensors, single) if call == "pack" else ops.unpack(single, tensors)
    tensors, single = overlapping(4)
    ops.pack(tensors, single) if call == "pack" else ops.unpack(single, tensors)
    halves = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="not to share memory"):  # the place, but another type
        ops.pack([halves.view(torch.float16)], halves)


def test_tensors_that_overlap_each_other_are_read_and_not_written() -> None:
    memory = torch.arange(4.0)
    out = torch.zeros(6)
    ops.pack([memory[:3], memory[1:]], out)
    assert out.tolist() == [0.0, 1.0, 2.0, 1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="not to share memory with each other"):
        ops.unpack(out, [memory[:3], memory[1:]])
    assert memory.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (torch.zeros(3, dtype=torch.float64), "'residual' of type float32, got float64"),
        (torch.zeros(2), "'residual' with 3 elements like 'out', got 2"),
        (torch.zeros(3, 2)[:, 0], "'residual' to be contiguous"),
    ],
)
def test_wrong_residuals_are_named(residual: Tensor, message: str) -> None:
    out = torch.full((3,), 7.0)
    with pytest.raises(ValueError, match=message):
        ops.pack([torch.ones(3)], out, residual=residual)
    assert out.tolist() == [7.0, 7.0, 7.0]


def test_a_residual_apart_from_the_rest_is_required() -> None:
    out, tensor = torch.zeros(3), torch.ones(3)
    with pytest.raises(ValueError, match="not to share memory with 'out'"):
        ops.pack([tensor], out, residual=out)
    with pytest.raises(ValueError, match="not to share memory with one of 'tensors'"):
        ops.pack([tensor], out, residual=tensor)
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_a_divisor_below_one_is_refused() -> None:
    tensor = torch.full((3,), 7.0)
    with pytest.raises(ValueError, match="'divisor' to be at least 1, got 0"):
        ops.unpack(torch.ones(3), [tensor], divisor=0)
    assert tensor.tolist() == [7.0, 7.0, 7.0]
