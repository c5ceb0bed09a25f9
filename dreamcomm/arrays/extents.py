"""Where arrays lie in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dreamcomm.arrays.views import View

__all__ = ["Extent", "extent", "overlap"]


def overlap(view: View) -> bool:
    """True if two elements of the array may share memory, as in a broadcast array."""
    array, tensor = view.memory, view.tensor
    if tensor.numel() <= 1:
        return False
    strides, reach = tensor.stride(), 1  # in elements
    if array is not None:
        strides, reach = tuple(abs(one) for one in array.strides), array.itemsize  # in bytes
    for stride, size in sorted(zip(strides, tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
    return False


class Extent(NamedTuple):
    """The device of an array, its first byte, and the byte after its last one."""

    device: torch.device
    begin: int
    end: int

    def meets(self, other: Extent) -> bool:
        """Whether they share bytes, or lie between each other's."""
        return self.device == other.device and self.begin < other.end and other.begin < self.end


def extent(view: View) -> Extent:
    """Where the array lies."""
    array, tensor = view.memory, view.tensor
    item = tensor.element_size()
    if array is None:
        begin, strides = tensor.data_ptr(), [one * item for one in tensor.stride()]
    else:
        begin, strides = array.__array_interface__["data"][0], list(array.strides)
    if tensor.numel() == 0:
        return Extent(tensor.device, begin, begin)
    steps = [stride * (size - 1) for stride, size in zip(strides, tensor.shape, strict=True)]
    end = begin + item + sum(one for one in steps if one > 0)
    return Extent(tensor.device, begin + sum(one for one in steps if one < 0), end)
