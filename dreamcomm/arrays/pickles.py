"""Objects as bytes: a pickle of protocol 5, and the buffers of its arrays beside it.

A message of an object begins with a block of fixed size, so that its receiver knows the sizes of
what follows. A small object lies in that block, and nothing follows.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dreamcomm.arrays.views import pieces, view_of

__all__ = ["BLOCK", "Pickled", "Reader", "pickled"]

BLOCK = 960  # bytes of the first block: a message of this size is sent before its receive
HEAD = 24  # of it: three numbers
FORMAT = np.int64
LEAST_APART = 16384  # bytes of a buffer: below, a copy is faster than a message


class Pickled(NamedTuple):
    """An object to send.

    Attributes:
        block: uint8, of BLOCK bytes: numbers of bytes of the two parts that follow, number of
            buffers, and the directory if it fits.
        directory: uint8: the sizes of the buffers, and the pickle; None if they are in the block.
        buffers: uint8: what the pickle leaves out, where it lies.
    """

    block: Tensor
    directory: Tensor | None
    buffers: Sequence[Tensor]

    @property
    def rest(self) -> list[Tensor]:
        """What follows the block."""
        return [*([] if self.directory is None else [self.directory]), *self.buffers]


def pickled(thing: object) -> Pickled:
    """Pickles an object. Raises what pickle raises."""
    buffers: list[Tensor] = []

    def takes_in(one: pickle.PickleBuffer) -> bool:
        """Whether a buffer lies in the pickle: each other one is a message."""
        memory = one.raw()
        if memory.nbytes < LEAST_APART:
            return True
        buffers.append(_tensor(memory))
        return False

    text = pickle.dumps(thing, protocol=5, buffer_callback=takes_in)
    sizes = np.array([one.numel() for one in buffers], FORMAT).tobytes()
    directory = sizes + text
    head = np.array([len(directory), sum(one.numel() for one in buffers), len(buffers)], FORMAT)
    is_small = HEAD + len(directory) <= BLOCK
    block = bytearray(BLOCK)
    block[:HEAD] = head.tobytes()
    if is_small:
        block[HEAD : HEAD + len(directory)] = directory
    rest = None if is_small else _tensor(memoryview(bytearray(directory)))
    return Pickled(_tensor(memoryview(block)), rest, [one for one in buffers if one.numel()])


class Reader:
    """Reads an object from its block, and then from what follows.

    Args:
        block: uint8, as :class:`Pickled` has it.

    Attributes:
        directory: memory for it, to be filled before :meth:`open`; None if it was in the block.
        follows: bytes of directory and buffers outside the block.
    """

    def __init__(self, block: Tensor) -> None:
        self._block = block.numpy()
        size, buffers, self._count = (int(one) for one in self._block[:HEAD].view(FORMAT))
        self._size = size
        self.directory = None if HEAD + size <= BLOCK else _new(size)
        self.follows = buffers + (0 if self.directory is None else size)
        self._buffers: list[Tensor] = []

    def open(self) -> list[Tensor]:
        """Memory for the buffers that are not empty, to be filled before :meth:`value`."""
        sizes = self._bytes()[: 8 * self._count].view(FORMAT)
        self._buffers = [_new(int(size)) for size in sizes]
        return [one for one in self._buffers if one.numel()]

    def take(self, memory: Tensor) -> None:
        """Takes all that follows the block out of one piece of memory."""
        if self.directory is not None:
            self.directory.copy_(memory[: self._size])
            memory = memory[self._size :]
        buffers = self.open()
        for one, part in zip(buffers, pieces(memory, [b.numel() for b in buffers]), strict=True):
            one.copy_(part)

    def value(self) -> Any:
        """The object. Raises what unpickling raises."""
        text = self._bytes()[8 * self._count :]
        return pickle.loads(text.data, buffers=[one.numpy() for one in self._buffers])

    def _bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self.directory is not None:
            return self.directory.numpy()
        return self._block[HEAD : HEAD + self._size]


def _new(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _tensor(memory: memoryview) -> Tensor:
    """A tensor on memory that nobody writes meanwhile."""
    return view_of(memory, "a buffer").tensor.view(-1)
