"""What gossip counts on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["GossipReport"]


@dataclass(frozen=True)
class GossipReport:
    """What a rank has done since its Gossip was made. ``str(report)`` is a line.

    Attributes:
        steps: calls of step(), also those before a checkpoint that was loaded.
        rounds: applied ones.
        outstanding: rounds that were sent and are not applied yet.
        waited: seconds in which it waited for other ranks.
        delays: by the number of steps between sending a round and applying it, how many rounds.
        sent_bytes: of all messages, to all peers.
        damping: the factor of increments; 1 without a bound.
    """

    steps: int
    rounds: int
    outstanding: int
    waited: float
    delays: Mapping[int, int]
    sent_bytes: int
    damping: float

    def __str__(self) -> str:
        delays = ", ".join(f"{delay}: {count}" for delay, count in sorted(self.delays.items()))
        return (
            f"{self.rounds} rounds applied in {self.steps} steps, {self.outstanding} outstanding; "
            f"delays {delays or 'none'}; waited {self.waited:.2f} s; sent "
            f"{self.sent_bytes / 1e6:.1f} MB; increments times {self.damping:.4g}"
        )
