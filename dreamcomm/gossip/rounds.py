"""Rounds of gossip: each is sent in its step, and applied in that step or in a later one."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from torch import Tensor

from dreamcomm.gossip.channel import GossipChannel
from dreamcomm.gossip.delays import damping, drawn_delay
from dreamcomm.gossip.pieces import Pieces, increments
from dreamcomm.gossip.topology import Topology

__all__ = ["Rounds"]

AHEAD = 4  # pieces that are sent before the first one is awaited


@dataclass
class _Round:
    """A round that this rank sends, or has sent and not applied yet.

    Attributes:
        step: in which it was sent.
        own: this rank's pieces as they were sent; None: the current ones count.
    """

    step: int
    own: list[Tensor | None]


class Rounds:
    """One rank's rounds.

    Args:
        channel: of the messages.
        pieces: of the model.
        topology: who averages with whom.
        bound: the largest delay in steps.
        seed: of the delays; None: a round is applied when it is here.

    Attributes:
        damping: the factor of increments.
        applied: how many rounds.
        delays: how many by their delay.
    """

    def __init__(
        self,
        channel: GossipChannel,
        pieces: Pieces,
        topology: Topology,
        bound: int,
        seed: int | None,
    ) -> None:
        self._channel, self._pieces, self._topology = channel, pieces, topology
        self._bound, self._seed = bound, seed
        self.damping = damping(topology.stretch, bound)
        self._rounds: deque[_Round] = deque()
        self._last = 0  # step
        self.applied = 0
        self.delays: Counter[int] = Counter()

    @property
    def outstanding(self) -> int:
        """Rounds that were sent and are not applied."""
        return len(self._rounds)

    def step(self, number: int) -> None:
        """Sends the round of a step, counted from 1, and applies what is due."""
        self._last = number
        if self._bound == 0:
            self._exchange(number)
            return
        self._send(number)
        self._apply_due(number)

    def finish(self) -> None:
        """Applies all rounds that are outstanding."""
        while self._rounds:
            self._apply(self._rounds.popleft(), self._last)

    def drop(self) -> None:
        """Forgets all rounds that are outstanding."""
        self._rounds.clear()

    # Without a bound.

    def _exchange(self, number: int) -> None:
        """Applies each piece as soon as a few after it are under way.

        So only a few pieces need memory beside the model.
        """
        count, round_ = len(self._pieces), _Round(number, [None] * len(self._pieces))
        ahead = min(AHEAD, count)
        for place in range(count + ahead):
            if place < count:
                self._send_piece(number, place, self._pieces.read(place))
            if place >= ahead:
                self._channel.drain()  # what was sent may be the parameters' own memory
                self._apply_piece(round_, place - ahead)
        self._count(round_, number)

    # With one.

    def _send(self, number: int) -> None:
        """Sends a round, of which this rank keeps a copy."""
        keeps = bool(self._topology.sources(self._channel.rank, number - 1))
        own: list[Tensor | None] = []
        for place, piece in enumerate(self._pieces.pieces):
            data = self._pieces.copy(place)
            self._send_piece(number, place, data)
            own.append(data if keeps and not piece.is_buffer else None)
        self._rounds.append(_Round(number, own))

    def _apply_due(self, number: int) -> None:
        """Applies the rounds whose time has come, and without a seed those that are here."""
        delay = self._bound
        if self._seed is not None:
            delay = drawn_delay(self._seed, self._channel.rank, number, self._bound)
        while self._rounds:
            step = self._rounds[0].step
            arrived = self._seed is None and self._channel.is_here(step)
            if step > number - delay and not arrived:
                break
            self._apply(self._rounds.popleft(), number)

    def _apply(self, round_: _Round, number: int) -> None:
        """Adds a round's increments, when its messages are here."""
        for place in range(len(self._pieces)):
            self._apply_piece(round_, place)
        self._count(round_, number)

    # Both.

    def _send_piece(self, number: int, place: int, data: Tensor) -> None:
        targets = self._topology.targets(self._channel.rank, number - 1)
        on_cpu = data.to("cpu") if targets else data
        for peer in targets:
            self._channel.send(peer, number, place, on_cpu)
        self._channel.poll()

    def _apply_piece(self, round_: _Round, place: int) -> None:
        sources = self._topology.sources(self._channel.rank, round_.step - 1)
        if not sources:
            return
        kept = round_.own[place]
        own = self._pieces.read(place) if kept is None else kept
        received = [
            (weight * self.damping, self._channel.take(round_.step, peer, place).to(own.device))
            for peer, weight in sources
        ]
        self._pieces.add_(place, increments(own, received))
        round_.own[place] = None

    def _count(self, round_: _Round, number: int) -> None:
        self.applied += 1
        self.delays[number - round_.step] += 1
