"""How far workers are ahead of each other, and how far they may be. Pure bookkeeping.

Each worker's clock counts its pushes. A worker may read weights if it is at most ``bound`` pushes
ahead of the slowest one (stale synchronous parallel: Ho et al. 2013, "More effective distributed
ML via a stale synchronous parallel parameter server")::

    bound 2      clock   0   1   2   3
    worker 0            ====           slowest, at 1
    worker 1            ============   at 3: may read
    worker 2            ================ at 4: waits for worker 0
"""

from __future__ import annotations

from collections import Counter

__all__ = ["Clocks"]


class Clocks:
    """The clocks of the workers that are here.

    Args:
        bound: the most by which a worker that reads may be ahead of the slowest; None: any number.
    """

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.staleness: Counter[int] = Counter()  # how far ahead those were that have read
        self._clock: dict[int, int] = {}

    def join(self, rank: int) -> None:
        """A worker begins where the slowest is."""
        self._clock[rank] = min(self._clock.values(), default=0)

    def leave(self, rank: int) -> None:
        """A worker no longer holds back the others."""
        self._clock.pop(rank, None)

    def tick(self, rank: int) -> None:
        """A worker has pushed."""
        self._clock[rank] += 1

    def ahead(self, rank: int) -> int:
        """By how many pushes a worker is ahead of the slowest."""
        return self._clock[rank] - min(self._clock.values())

    def may_read(self, rank: int) -> bool:
        """Whether a worker is within the bound."""
        return self.bound is None or self.ahead(rank) <= self.bound

    def read(self, rank: int) -> int:
        """Notes that a worker reads now; returns its staleness."""
        ahead = self.ahead(rank)
        self.staleness[ahead] += 1
        return ahead

    def holding_back(self, rank: int) -> list[int]:
        """The workers that a worker waits for."""
        if self.bound is None:
            return []
        least = self._clock[rank] - self.bound
        return sorted(other for other, clock in self._clock.items() if clock < least)
