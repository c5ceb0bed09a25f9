"""Gossip in one process, in float64: what Gossip has to equal, and what its damping is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Delay = Callable[[int, int], int]  # of a rank's step, from 1 on
Local = Callable[[int, int, Any], None]  # a rank's step changes its parameters


class Simulated:
    """Ranks whose parameters are the rows of a matrix.

    Args:
        matrices: of weights, used in turn.
        start: [ranks, parameters].
        gamma: the factor of increments.
        delay: in a step a rank applies what was sent at least so many steps before.
    """

    def __init__(
        self,
        matrices: Sequence[Any],
        start: Any,
        gamma: float = 1.0,
        delay: Delay = lambda rank, step: 0,
    ) -> None:
        self.x = np.array(start, dtype=np.float64)
        self.rounds: list[Any] = []  # each with an increment for each rank
        self.applied = [0] * len(self.x)
        self._matrices = [np.array(one, dtype=np.float64) for one in matrices]
        self._gamma, self._delay = gamma, delay

    def step(self, local: Local | None = None) -> None:
        number = len(self.rounds) + 1
        for rank in range(len(self.x)):
            if local is not None:
                local(rank, number, self.x[rank])
        weights = self._matrices[(number - 1) % len(self._matrices)]
        self.rounds.append(self._gamma * (weights @ self.x - self.x))
        for rank in range(len(self.x)):
            self._apply(rank, number - self._delay(rank, number))

    def finish(self) -> None:
        for rank in range(len(self.x)):
            self._apply(rank, len(self.rounds))

    def _apply(self, rank: int, due: int) -> None:
        while self.applied[rank] < due:
            self.x[rank] += self.rounds[self.applied[rank]][rank]
            self.applied[rank] += 1

    @property
    def distance(self) -> float:
        return distance(self.x)


def distance(x: Any) -> float:
    """How far ranks are from their mean."""
    return float(np.linalg.norm(x - x.mean(0)))
