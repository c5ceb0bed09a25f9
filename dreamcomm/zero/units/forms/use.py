"""Who uses the whole parameters of a unit."""

from __future__ import annotations

__all__ = ["UnitUse"]


class UnitUse:
    """Whole parameters that are in memory while they are used.

    Args:
        number: of the unit in its tree, the same on all ranks.

    Attributes:
        users: forward passes that compute with the unit now.
        backward_uses: forward passes through which a backward pass goes now.
        is_kept: they stay after a forward pass.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.users = self.backward_uses = 0
        self.is_kept = False

    def free(self) -> None:
        """Takes them out of memory."""
        raise NotImplementedError

    def free_if_unused(self) -> None:
        if not (self.users or self.backward_uses or self.is_kept):
            self.free()
