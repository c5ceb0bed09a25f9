"""Arrays of any library as tensors on the same memory, and results in the kind that was given.

NumPy's arrays are taken as they are, others by DLPack or the buffer protocol, through NumPy: its
import of DLPack asks for the read-only flag, and takes strides that are negative. torch's takes a
read-only array for a writable one, and ends the process for a negative stride.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["View", "is_on_accelerator", "pieces", "view_of"]

CPU = 1  # kDLCPU
# Libraries whose arrays never change. JAX's export cannot say so.
CONSTANT = ("jax", "jaxlib", "tensorflow")
LONGEST = {"c": 16}  # bytes of an element: long doubles have more
# Types that NumPy has from ml_dtypes, by name: their bits, and torch's type of the same bits.
BITS: dict[str, tuple[type[np.generic], torch.dtype]] = {
    "bfloat16": (np.uint16, torch.bfloat16),
    **{
        f"float8_{one}": (np.uint8, getattr(torch, f"float8_{one}"))
        for one in ("e5m2", "e4m3fn", "e5m2fnuz", "e4m3fnuz", "e8m0fnu")
    },
}


class View(NamedTuple):
    """An array that a call reads or writes.

    Attributes:
        tensor: on the array's memory, or on a copy, where torch has no such strides.
        why_constant: why the array cannot be written; "" if it can.
        like: turns a tensor, which nobody else has, into an array of the given kind.
        written: called after the tensor was written; None: there is nothing to do.
        memory: the array, where the tensor is on a copy of it.
    """

    tensor: Tensor
    why_constant: str
    like: Callable[[Tensor], Any]
    written: Callable[[], None] | None = None
    memory: NDArray[Any] | None = None


def view_of(given: Any, name: str) -> View:
    """Reads an array.

    Args:
        given: a NumPy array, torch tensor, buffer, or anything that speaks DLPack.
        name: the argument, for errors.

    Raises:
        TypeError: it is no array, or its elements are of a type that no collective has.
        ValueError: its elements are in another byte order.
    """
    if isinstance(given, Tensor):
        return _of_torch(given, name)
    if isinstance(given, np.ndarray):
        if isinstance(given, np.ma.MaskedArray):
            raise TypeError(f"{name}: a masked array; pass what its mask means, as array.filled(0)")
        return _of_numpy(given, name, _to_numpy(given.dtype))
    if isinstance(given, np.generic):
        return _of_numpy(np.asarray(given), name, _to_scalar)._replace(
            why_constant="NumPy's scalars never change"
        )
    if hasattr(given, "__dlpack__"):
        return _of_dlpack(given, name)
    found = _of_buffer(given, name)
    if found is None:
        raise TypeError(
            f"{name}: expected an array (NumPy, torch, a buffer, or what has __dlpack__), got "
            f"{type(given).__name__}"
        )
    return found


def is_on_accelerator(given: Any) -> bool:
    """Whether an array is, or all of a list, tuple or dict."""
    if isinstance(given, np.ndarray):
        return False
    if isinstance(given, Tensor):
        return not given.is_cpu
    if isinstance(given, (list, tuple, dict)):
        leaves = given.values() if isinstance(given, dict) else given
        found = [one for one in leaves if one is not None]
        return bool(found) and all(is_on_accelerator(one) for one in found)
    return hasattr(given, "__dlpack_device__") and given.__dlpack_device__()[0] != CPU


def pieces(tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The parts of a tensor of one dimension, one after the other."""
    found: Sequence[Tensor] = torch.functional.split(tensor, list(sizes))
    return found


def _of_torch(given: Tensor, name: str) -> View:
    """The view of a tensor. A write to it is counted for autograd, as one by torch is."""
    is_dense = given.layout is torch.strided and not given.is_quantized
    if not is_dense or is_traceable_wrapper_subclass(given):
        raise TypeError(
            f"{name}: expected a dense tensor, got a {type(given).__name__} of {given.dtype} and "
            f"layout {given.layout}"
        )
    counted = None if given.is_inference() else partial(increment_version, given)
    return View(given.detach(), "", _same, counted)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _of_buffer(given: Any, name: str) -> View | None:
    """The view of an object with a buffer; None if it has none."""
    try:
        memory = memoryview(given)
    except (BufferError, TypeError):
        return None
    try:
        elements = np.asarray(memory)
    except ValueError as error:
        raise TypeError(f"{name}: a buffer of format {memory.format!r}: {error}") from error
    return _of_numpy(elements, name, _to_buffer(given, memory))


def _of_dlpack(given: Any, name: str) -> View:
    """The view of what speaks DLPack: on a CPU through NumPy, else as torch's tensor."""
    library = type(given).__module__.partition(".")[0]
    if given.__dlpack_device__()[0] != CPU:
        return View(
            cast(Any, torch).from_dlpack(given), _constant(library), _to_library(given, library)
        )
    try:
        elements = np.from_dlpack(given)
    except (BufferError, RuntimeError, TypeError, ValueError):
        if not hasattr(given, "__array__"):
            raise
        elements = np.asarray(given)  # as JAX gives bfloat16
    found = _of_numpy(elements, name, _to_library(given, library))
    return found._replace(why_constant=_constant(library) or found.why_constant)


def _constant(library: str) -> str:
    return f"arrays of {library} never change" if library in CONSTANT else ""


@lru_cache
def _bits_of(kind: np.dtype[Any]) -> tuple[type[np.generic], torch.dtype] | None:
    return BITS.get(kind.name)


@lru_cache
def _why_none(kind: np.dtype[Any]) -> Exception | None:
    """Why no collective has such elements; the text follows the argument's name."""
    if not kind.isnative:
        return ValueError(
            f"elements of type {kind} are in another byte order; pass "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    if _bits_of(kind) is not None:
        return None
    if kind.kind not in "biufc" or kind.itemsize > LONGEST.get(kind.kind, 8):
        return TypeError(f"no collective has elements of type {kind}")
    return None


def _of_numpy(elements: NDArray[Any], name: str, like: Callable[[Tensor], Any]) -> View:
    """The view of a NumPy array."""
    kind = elements.dtype
    why_none = _why_none(kind)
    if why_none is not None:
        raise type(why_none)(f"{name}: {why_none}")
    bits = _bits_of(kind)
    if bits is not None:
        elements = elements.view(bits[0])
    elif kind.char == "Q":  # unsigned long long, which torch does not know
        elements = elements.view(np.uint64)
    flags = elements.flags
    memory, written = None, None
    try:
        tensor = torch.from_numpy(elements if flags.writeable else _writable(elements))
    except ValueError:  # torch counts strides in elements, and has no negative ones
        memory, copy = elements, elements.copy()
        tensor, written = torch.from_numpy(copy), partial(np.copyto, elements, copy)
    why = "" if flags.writeable else "it is read-only"
    tensor = tensor if bits is None else tensor.view(bits[1])
    return View(tensor, why, like, written, memory)


class _Memory:
    """The memory of a read-only array, for a reader that takes writable ones alone."""

    def __init__(self, elements: NDArray[Any]) -> None:
        self.elements = elements  # keeps the memory
        self.__array_interface__ = {
            **elements.__array_interface__,
            "data": (elements.__array_interface__["data"][0], False),
        }


def _writable(elements: NDArray[Any]) -> NDArray[Any]:
    """A writable array on read-only memory, which nobody writes."""
    return np.asarray(_Memory(elements))


def _to_numpy(kind: np.dtype[Any]) -> Callable[[Tensor], Any]:
    bits = _bits_of(kind)
    if bits is None:
        return Tensor.numpy
    width = {np.uint16: torch.uint16, np.uint8: torch.uint8}[bits[0]]
    return lambda tensor: tensor.view(width).numpy().view(kind)


def _to_scalar(tensor: Tensor) -> Any:
    """A scalar; of several ranks' scalars an array."""
    return tensor.numpy()[()]


def _to_buffer(given: Any, memory: memoryview) -> Callable[[Tensor], Any]:
    """Results of array.array, bytes and bytearray are of their type, others memoryviews."""

    def like(tensor: Tensor) -> Any:
        elements = tensor.contiguous().numpy()
        if isinstance(given, array.array):
            return array.array(given.typecode, elements.tobytes())
        if isinstance(given, (bytes, bytearray)):
            return type(given)(elements.tobytes())
        view: Any = elements.data
        kind = memory.format.lstrip("@=<")
        if view.format == kind or not view.nbytes or not tensor.dim():
            return view
        # NumPy has one name for types that have several here.
        return view.cast("B").cast(kind, list(tensor.shape))

    return like


def _to_library(given: Any, library: str) -> Callable[[Tensor], Any]:
    """Results are made by the array's own library."""

    def like(tensor: Tensor) -> Any:
        if hasattr(given, "__array_namespace__"):
            space = given.__array_namespace__()
            return space.from_dlpack(tensor)
        if library == "tensorflow":
            return sys.modules["tensorflow"].convert_to_tensor(tensor.numpy())
        maker = getattr(sys.modules.get(library), "from_dlpack", None)
        return tensor.numpy() if maker is None else maker(tensor)

    return like
