"""Elements of every dtype as NumPy arrays, and the reductions over them, bit for bit.

bfloat16, which NumPy lacks, is held as the uint16 of the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, "bool")
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def ops_of(dtype: str) -> tuple[str, ...]:
    """The reductions that torch lets through and that have a meaning on `dtype`."""
    if dtype in COMPLEX:
        return ("SUM", "AVG", "PREMUL_SUM")
    if dtype == "bool":
        return ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    if dtype in FLOATS:
        return ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")
    return ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def random_array(dtype: str, count: int, rng: np.random.Generator) -> Array:
    """`count` elements whose sums depend on the order and never become NaN."""
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if dtype in INTEGERS:
        # An eighth of the range: AVG must not depend on when a sum wraps.
        limits = np.iinfo(dtype)
        return rng.integers(limits.min // 8, limits.max // 8, count, dtype, endpoint=True)
    if dtype in COMPLEX:
        parts = random_array("float32" if dtype == "complex64" else "float64", 2 * count, rng)
        return parts.view(dtype)
    magnitude = rng.uniform(0.5, 2.0, count) * 2.0 ** rng.integers(-3, 4, count)
    return narrow(magnitude * rng.choice([-1.0, 1.0], count), dtype)


def narrow(values: Array, dtype: str) -> Array:
    """Rounds floating values to `dtype`, to nearest even."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(values: Array, dtype: str) -> Array:
    """What a reduction computes with: float32 for the 16-bit floating dtypes."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if dtype == "float16" else values


def reduce(op: str, dtype: str, inputs: Sequence[Array], factors: Sequence[float] = ()) -> Array:
    """Combines the ranks' arrays from left to right; one rounding for 16-bit dtypes.

    ``factors``: of PREMUL_SUM, one for each rank.
    """
    if dtype in COMPLEX:  # real and imaginary parts do not meet in the ops of complex
        part = "float32" if dtype == "complex64" else "float64"
        return reduce(op, part, [x.view(part) for x in inputs], factors).view(dtype)
    terms = [widen(x, dtype) for x in inputs]
    if op == "PREMUL_SUM":
        terms = [x * x.dtype.type(by) for x, by in zip(terms, factors, strict=True)]
    total = terms[0].copy()
    with np.errstate(over="ignore"):
        for term in terms[1:]:
            total = _combine(op, total, term)
    if op == "AVG":
        total = divide(total, len(inputs))
    with np.errstate(over="ignore"):
        return narrow(total, dtype) if dtype in HALVES else total


def _combine(op: str, left: Array, right: Array) -> Array:
    boolean = left.dtype == bool
    if boolean:
        op = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}.get(op, op)
    if op in ("SUM", "AVG", "PREMUL_SUM"):
        return np.add(left, right)
    if op == "PRODUCT":
        return np.multiply(left, right)
    if op in ("MIN", "MAX"):
        return np.minimum(left, right) if op == "MIN" else np.maximum(left, right)
    bitwise: dict[str, Array] = {
        "BAND": left & right,
        "BOR": left | right,
        "BXOR": left ^ right,
    }
    return bitwise[op]


def divide(total: Array, count: int) -> Array:
    """total / count; integers toward zero."""
    divisor = total.dtype.type(count)
    if total.dtype.kind == "f":
        return total / divisor
    quotient = total // divisor
    return quotient + ((total % divisor != 0) & (total < 0)).astype(total.dtype)


def to_tensor(values: Array, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(values))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The elements' bits in logical order, whatever the tensor's layout."""
    # One dense row first: a tensor of one element may have any stride, which view refuses.
    row = torch.empty(tensor.numel(), dtype=tensor.dtype)
    row.copy_(tensor.detach().reshape(-1))
    return row.view(torch.uint8).numpy().tobytes()


def torch_dtype(dtype: str) -> torch.dtype:
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found
