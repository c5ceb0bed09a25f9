"""The order in which peers send the pieces of rounds to this rank."""

from __future__ import annotations

from dreamcomm.gossip.topology import Topology

__all__ = ["Arrivals"]


class Arrivals:
    """The piece that each peer sends next.

    Args:
        topology: who sends to whom.
        rank: this one.
        pieces: of each round.
    """

    def __init__(self, topology: Topology, rank: int, pieces: int) -> None:
        self._pieces = pieces
        self._sources = [
            {peer for peer, _ in topology.sources(rank, number)}
            for number in range(topology.period)
        ]
        self.restart(0)

    def restart(self, steps: int) -> None:
        """The next round is the one after so many steps."""
        # By peer, the step and the piece.
        self._next = {
            peer: (self._following(peer, steps), 0) for peer in set().union(*self._sources)
        }

    def of(self, step: int) -> list[tuple[int, int]]:
        """The peers and the pieces of a step."""
        return [(peer, piece) for peer in self._sources_of(step) for piece in range(self._pieces)]

    def _sources_of(self, step: int) -> set[int]:
        return self._sources[(step - 1) % len(self._sources)]

    def _following(self, source: int, step: int) -> int:
        """The first step after this one in which the peer sends to this rank."""
        step += 1
        while source not in self._sources_of(step):
            step += 1
        return step

    def add(self, source: int, step: int, piece: int) -> bool:
        """Counts a piece that has come. False if another one was to come."""
        if self._next.get(source) != (step, piece):
            return False
        last = piece == self._pieces - 1
        self._next[source] = (self._following(source, step), 0) if last else (step, piece + 1)
        return True
