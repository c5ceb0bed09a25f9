"""Memory that units take turns in."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["Pool"]


class Pool:
    """Blocks of bytes, used again: pages that the system has given stay.

    A block that is too small for what is wanted goes back to the system, so that the pool never has
    more than were in use at a time, except for what a larger block has more than its unit.

    Args:
        make: gives a tensor of so many bytes.

    Attributes:
        in_use, most: blocks now, and at most at a time.
        most_bytes: of blocks in use, at a time.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._free: list[Tensor] = []
        self.in_use = self.most = 0
        self._bytes = self.most_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """A block of at least so many bytes."""
        block = self._fitting(nbytes)
        self.in_use += 1
        self._bytes += block.numel()
        self.most = max(self.most, self.in_use)
        self.most_bytes = max(self.most_bytes, self._bytes)
        return block

    def _fitting(self, nbytes: int) -> Tensor:
        fits = [place for place, one in enumerate(self._free) if _fits(one, nbytes)]
        if fits:
            return self._free.pop(min(fits, key=lambda place: self._free[place].numel()))
        if self._free:
            self._free.pop(0)
        return self._make(nbytes)

    def give(self, block: Tensor) -> None:
        """Takes a block back."""
        self.in_use -= 1
        self._bytes -= block.numel()
        self._free.append(block)


def _fits(block: Tensor, nbytes: int) -> bool:
    return nbytes <= block.numel() <= 2 * nbytes
