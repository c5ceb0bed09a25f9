"""The same elements as arrays of several kinds, and the bits of arrays of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

NUMPY = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
FLOAT8 = [f"float8_{one}" for one in ("e5m2", "e4m3fn", "e5m2fnuz", "e4m3fnuz", "e8m0fnu")]
# Types that arrays of a kind have, and the core reduces.
TYPES = {"numpy": NUMPY, "torch": [*NUMPY, "bfloat16"], "memoryview": NUMPY}
KINDS = list(TYPES)


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def numbers(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random numbers that a reduction does not overflow to infinity."""
    random = torch.Generator().manual_seed(seed)
    dtype = dtype_of(name)
    if dtype.is_complex:
        return torch.randn(shape, generator=random, dtype=torch.complex128).to(dtype)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=random, dtype=torch.float64) * 3).to(dtype)
    top = 2 if dtype is torch.bool else 9
    bottom = -9 if dtype.is_signed else 0
    return torch.randint(bottom, top, shape, generator=random).to(dtype)


def noise(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bits, also of what is no number."""
    dtype = dtype_of(name)
    if dtype is torch.bool:
        return numbers(name, shape, seed)
    random = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    made = torch.randint(0, 256, (count,), generator=random).to(torch.uint8)
    return made.view(dtype).reshape(shape)


def made(kind: str, tensor: Tensor) -> Any:
    """A new array of the kind, with the elements of the tensor."""
    if kind == "torch":
        return tensor.clone()
    elements = tensor.numpy().copy()
    return elements if kind == "numpy" else memoryview(elements)


def bits(array: Any) -> bytes:
    if isinstance(array, Tensor):
        return array.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert isinstance(array, (np.ndarray, memoryview))
    return array.tobytes()


def face(array: Any) -> tuple[Any, ...]:
    """What an array is, without its elements."""
    if isinstance(array, memoryview):
        return memoryview, array.format, array.shape
    return type(array), array.dtype, tuple(array.shape)


def assert_same(found: Any, kind: str, expected: Tensor) -> None:
    """The array has the kind, type, shape and bits."""
    like = made(kind, expected)
    assert face(found) == face(like)
    assert bits(found) == bits(like)
