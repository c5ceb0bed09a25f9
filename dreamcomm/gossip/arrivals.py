"""The pieces of rounds that have arrived, and those that are to come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dreamcomm.gossip.topology import Topology
from dreamcomm.messages.messenger import Arriving

__all__ = ["Arrivals"]


class Arrivals:
    """One rank's messages of rounds, which each peer sends in order.

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
        """Forgets all; the next round is the one after so many steps."""
        self._here: dict[tuple[int, int], list[Arriving | None]] = {}  # by step and peer
        # By peer, the step and the piece that it sends next.
        self._next = {
            peer: (self._following(peer, steps), 0) for peer in set().union(*self._sources)
        }

    def _sources_of(self, step: int) -> set[int]:
        return self._sources[(step - 1) % len(self._sources)]

    def _following(self, source: int, step: int) -> int:
        """The first step after this one in which the peer sends to this rank."""
        step += 1
        while source not in self._sources_of(step):
            step += 1
        return step

    def add(self, arriving: Arriving, step: int, piece: int) -> bool:
        """Takes in a message. False if another one was to come."""
        source = arriving.source
        if self._next.get(source) != (step, piece):
            return False
        self._here.setdefault((step, source), []).append(arriving)
        last = piece == self._pieces - 1
        self._next[source] = (self._following(source, step), 0) if last else (step, piece + 1)
        return True

    def missing(self, step: int, source: int, piece: int) -> tuple[int, int] | None:
        """The peer and the step, if the piece is not here."""
        return None if len(self._here.get((step, source), ())) > piece else (source, step)

    def missing_until(self, step: int) -> tuple[int, int] | None:
        """A peer and a step up to this one, if a piece of it is not here."""
        coming = ((peer, number) for peer, (number, _) in self._next.items() if number <= step)
        return next(coming, None)

    def of(self, step: int) -> Iterable[Arriving] | None:
        """All messages of a step that nothing was taken of; None if some are not here."""
        found: list[Arriving] = []
        for source in self._sources_of(step):
            if self.missing(step, source, self._pieces - 1) is not None:
                return None
            found += [one for one in self._here[step, source] if one is not None]
        return found

    def take(self, step: int, source: int, piece: int) -> Arriving:
        """A piece that is here, once."""
        here = self._here[step, source]
        arriving = here[piece]
        assert arriving is not None
        here[piece] = None
        if piece == self._pieces - 1:
            del self._here[step, source]
        return arriving

    def left(self) -> list[Arriving]:
        """All messages that are here."""
        return [one for here in self._here.values() for one in here if one is not None]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Steps and peers of which something is here."""
        return iter(self._here)
