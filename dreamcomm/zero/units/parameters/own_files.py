"""Memory of one rank in files, and the order in which it goes to the disk.

start writing   | a | b | c | d | e |
drop                    | a | b | c |     once BEHIND bytes were written after it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dreamcomm._C import Region, RegionFolder

__all__ = ["PAGE", "OwnFiles", "padded"]

PAGE = 4096
# Bytes of one rank: what the disk writes while the rank computes. Enough for 30 ms of 1 GB/s.
BEHIND = 32 << 20


def padded(nbytes: int) -> int:
    """Bytes up to the next page: what is dropped has no page with other tensors."""
    return -(-nbytes // PAGE) * PAGE


class OwnFiles:
    """Makes tensors in unnamed files of a folder. Each file ends with the last tensor in it.

    Args:
        folder: of the tree.
    """

    def __init__(self, folder: RegionFolder) -> None:
        self.folder = folder
        self._region: Region | None = None
        self._end = 0  # of what is in use of it
        self._least = 0  # bytes of a new file
        self._written: deque[tuple[int, Sequence[Tensor]]] = deque()
        self._behind = 0  # bytes of these

    def reserve(self, nbytes: int) -> None:
        """Makes a file for the next tensors, and another of this size whenever one is full.

        Raises:
            RuntimeError: the folder has no room for it, or is none.
        """
        self._least = nbytes
        if nbytes > 0:
            self._make(nbytes)

    def _make(self, nbytes: int) -> Region:
        from dreamcomm import _C

        self._region, self._end = _C.make_own_region(nbytes, self.folder), 0
        return self._region

    def zeros(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A dense tensor. An empty one lies in no file.

        Raises:
            RuntimeError: a new file is needed, for which the folder has no room.
        """
        nbytes = padded(torch.Size(shape).numel() * dtype.itemsize)
        if nbytes == 0:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        region = self._region
        if region is None or self._end + nbytes > region.bytes:
            region = self._make(max(nbytes, self._least))
        begin, self._end = self._end, self._end + nbytes
        return region.tensor(begin, list(shape), list(strides), dtype, True)

    def zeros_like(self, rows: Tensor) -> Tensor:
        """As :meth:`zeros`."""
        return self.zeros(rows.shape, rows.stride(), rows.dtype)

    def copy_of(self, value: Tensor, rows: Tensor) -> Tensor:
        """A value as rows lie. As :meth:`zeros`."""
        made = self.zeros_like(rows).copy_(value)
        self.wrote([made])
        return made

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in files of the folder, or is empty."""
        from dreamcomm import _C

        return tensor.numel() == 0 or _C.folder_of(tensor) == self.folder.path

    def wrote(self, tensors: Sequence[Tensor]) -> None:
        """Has the disk write tensors from now on, and drops what was written earlier.

        Raises:
            RuntimeError: the disk has failed.
        """
        from dreamcomm import _C

        _C.write_files(tensors)
        nbytes = sum(one.nbytes for one in tensors)
        self._written.append((nbytes, tensors))
        self._behind += nbytes
        while self._behind - self._written[0][0] >= BEHIND:
            before, oldest = self._written.popleft()
            self._behind -= before
            _C.drop_files(oldest)
