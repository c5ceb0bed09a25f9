"""In which order passes use units, so that the next one is gathered while one computes."""

from __future__ import annotations

__all__ = ["UseOrder"]


class UseOrder:
    """Learns the order in the first pass::

    pass 1    0  1  2  3       learned
    pass 2    0: next is 1, 1: next is 2, ...
    pass 3    0  2             not as learned: the next pass is learned anew
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._place = 0  # of the next use
        self._learns = True

    def begin(self) -> None:
        """A pass begins."""
        self._place, self._learns = 0, not self._order

    def used(self, number: int) -> int | None:
        """Notes that a unit is used; the one that is used next, if that is known."""
        if self._learns:
            self._order.append(number)
            return None
        found = self._find(number)
        if found is None:
            self._order = []  # the next pass learns
            self._place = 0
            return None
        self._place = found + 1
        return self._order[self._place] if self._place < len(self._order) else None

    def _find(self, number: int) -> int | None:
        """Where the pass is: a unit may be used more than once."""
        order = self._order
        places = [*range(self._place, len(order)), *range(min(self._place, len(order)))]
        return next((place for place in places if order[place] == number), None)
