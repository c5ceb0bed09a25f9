"""When a server updates its weights, and when a worker may have them.

The caller of every method holds the server's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dreamcomm.memory import empty
from dreamcomm.server.clocks import Clocks
from dreamcomm.server.layout import Flats
from dreamcomm.server.weights import Weights

__all__ = ["Averaged", "Bounded", "Push", "Rule", "averaged"]


@dataclass(frozen=True)
class Push:
    """A worker's gradients.

    Attributes:
        gradients: by dtype.
        absent: numbers of parameters without a gradient.
        version: of the weights that the gradients were computed with.
    """

    gradients: Flats
    absent: tuple[int, ...]
    version: int


class Rule(Protocol):
    """How updates come from pushes."""

    clocks: Clocks
    lags: Counter[int]  # updates that a push did not know of

    def join(self, rank: int) -> None:
        """A worker is here."""

    def leave(self, rank: int) -> None:
        """A worker has left, or has died. May update."""

    def push(self, rank: int, push: Push) -> None:
        """A worker's gradients are here. May update."""

    def skip(self, rank: int) -> None:
        """A worker has no part in the update that others push for. May update."""

    def may_pull(self, rank: int) -> bool:
        """Whether a worker that has pushed may have weights."""

    def waits_for(self, rank: int) -> list[int]:
        """The workers that a worker waits for."""

    def missing(self) -> int:
        """The number of workers that have to join before the first update."""


class Averaged:
    """One update from all workers: the average of their gradients, added in the order of ranks.

    The bits are those of an all_reduce with AVG: sums of 16-bit gradients are float32, rounded
    once. A gradient that some workers lack counts as zero from them. The push of a worker that is
    lost afterwards counts, so that the result does not depend on when the loss is noticed.

    INVARIANT: a worker that has pushed waits until the update, so it pushes once an update, and
    all pushes are of the same weights.

    Args:
        weights: to update.
        workers: the first update waits until so many have joined, of different ranks.
    """

    def __init__(self, weights: Weights, workers: int) -> None:
        self.clocks, self.lags = Clocks(0), Counter[int]()
        self._weights, self._workers = weights, workers
        self._here: set[int] = set()
        self._joined: set[int] = set()
        self._pushed: dict[int, Push | None] = {}  # None: skipped

    def join(self, rank: int) -> None:
        self._pushed.pop(rank, None)  # of one before it, that was lost
        self._here.add(rank)
        self._joined.add(rank)
        self.clocks.join(rank)

    def leave(self, rank: int) -> None:
        self._here.discard(rank)
        self.clocks.leave(rank)
        self._update_if_complete()

    def push(self, rank: int, push: Push) -> None:
        self._pushed[rank] = push
        self.lags[self._weights.version - push.version] += 1
        self._update_if_complete()

    def skip(self, rank: int) -> None:
        self._pushed[rank] = None
        self._update_if_complete()

    def may_pull(self, rank: int) -> bool:
        return rank not in self._pushed

    def waits_for(self, rank: int) -> list[int]:
        return sorted(self._here - self._pushed.keys()) if rank in self._pushed else []

    def missing(self) -> int:
        return max(self._workers - len(self._joined), 0)

    def _update_if_complete(self) -> None:
        if not self._pushed or self._here - self._pushed.keys() or self.missing():
            return
        pushes = [push for _, push in sorted(self._pushed.items()) if push is not None]
        if pushes:
            self._step(pushes)
            for rank in self._here:
                self.clocks.tick(rank)
        self._pushed.clear()

    def _step(self, pushes: Sequence[Push]) -> None:
        absent = set.intersection(*(set(push.absent) for push in pushes))
        gradients = {
            dtype: averaged([push.gradients[dtype] for push in pushes])
            for dtype in self._weights.layout.sizes
        }
        self._weights.step(gradients, absent, keep=True)


def averaged(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of tensors of one dtype, added in order: the bits of an all_reduce with AVG."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    # The heap has memory that was written before: pages of new memory cost as much as the sums.
    total = empty(tensors[0].shape, dtype=wide, device="cpu")
    rest = tensors[1:]
    if rest and dtype == wide:  # one pass less
        torch.add(tensors[0], rest[0], out=total)
        rest = rest[1:]
    else:
        total.copy_(tensors[0])
    for one in rest:
        total += one.to(wide)
    return total.div_(len(tensors)).to(dtype)


class Bounded:
    """One update from each push, with the worker's gradients as they are.

    Args:
        weights: to update.
        bound: see :class:`Clocks`.
        scale: factor of the gradients.
        damping: a further factor, by the number of updates that a push did not know of; None: none.
    """

    def __init__(
        self,
        weights: Weights,
        bound: int | None,
        scale: float = 1.0,
        damping: Callable[[int], float] | None = None,
    ) -> None:
        self.clocks, self.lags = Clocks(bound), Counter[int]()
        self._weights, self._scale, self._damping = weights, scale, damping

    def join(self, rank: int) -> None:
        self.clocks.join(rank)

    def leave(self, rank: int) -> None:
        self.clocks.leave(rank)

    def push(self, rank: int, push: Push) -> None:
        lag = self._weights.version - push.version
        self.lags[lag] += 1
        factor = self._scale * (1.0 if self._damping is None else float(self._damping(lag)))
        if factor != 1.0:
            for gradient in push.gradients.values():
                gradient.mul_(factor)
        self._weights.step(push.gradients, push.absent, keep=False)
        self.clocks.tick(rank)

    def skip(self, rank: int) -> None:
        """Nothing: each push is an update of its own."""

    def may_pull(self, rank: int) -> bool:
        return self.clocks.may_read(rank)

    def waits_for(self, rank: int) -> list[int]:
        return self.clocks.holding_back(rank)

    def missing(self) -> int:
        return 0
