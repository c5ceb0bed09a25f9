"""Parameters that several stages share on different ranks.

Each such rank holds a copy. After a step's backward passes the copies' gradients are added in the
order of stages, and all copies get the sum: they then take equal steps and stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dreamcomm.pipeline.messages.channel import Channel
from dreamcomm.pipeline.messages.header import Key, Slot

__all__ = ["Tied", "TiedWeights", "find_tied"]

WEIGHT, PART, SUM = 0, 1, 2  # what a message holds


@dataclass(frozen=True)
class Tied:
    """A shared parameter.

    Attributes:
        name: its name in the first stage that has it.
        parameter: this rank's copy.
        places: of the ranks that hold it, in the order of their first stages with it.
    """

    name: str
    parameter: nn.Parameter
    places: tuple[int, ...]


def find_tied(
    stages: Sequence[Sequence[tuple[str, nn.Parameter]]], rank_of: Sequence[int]
) -> list[Tied]:
    """The parameters that stages on different ranks share.

    Args:
        stages: each stage's parameters with their names.
        rank_of: the place of each stage's rank in the pipeline.
    """
    names: dict[int, tuple[str, nn.Parameter]] = {}
    places: dict[int, list[int]] = {}
    for stage, named in enumerate(stages):
        for name, parameter in named:
            names.setdefault(id(parameter), (name, parameter))
            held = places.setdefault(id(parameter), [])
            if rank_of[stage] not in held:
                held.append(rank_of[stage])
    return [Tied(*names[key], tuple(held)) for key, held in places.items() if len(held) > 1]


class TiedWeights:
    """Keeps the copies of shared parameters equal.

    Args:
        tied: the same on all ranks of the pipeline.
        channel: to them.
        peers: the channel's rank for each place in the pipeline.
        place: this rank's.
    """

    def __init__(
        self, tied: Sequence[Tied], channel: Channel, peers: Sequence[int], place: int
    ) -> None:
        self._all = [(number, one) for number, one in enumerate(tied) if place in one.places]
        self._channel, self._peers, self._place = channel, peers, place

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's copies."""
        return [one.parameter for _, one in self._all]

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Those of which an earlier stage's rank holds a copy."""
        return [one.parameter for _, one in self._all if one.places[0] != self._place]

    def copy_weights(self, step: int) -> None:
        """Gives all copies the first one's values. Collective in the pipeline."""
        with torch.no_grad():
            for number, one in self._all:
                if self._is_first(one):
                    self._tell(step, number, one, WEIGHT, one.parameter.detach())
                else:
                    one.parameter.copy_(self._from_first(step, number, one, WEIGHT))
        self._channel.drain()

    def add_gradients(self, step: int) -> None:
        """Gives all copies the sum of their gradients. Collective in the pipeline."""
        for number, one in self._all:
            if not self._is_first(one):
                key = Key(step, Slot.TIED, number, PART)
                self._channel.send(self._peers[one.places[0]], key, one.parameter.grad)
        for number, one in self._all:
            if self._is_first(one):
                one.parameter.grad = self._summed(step, number, one)
                self._tell(step, number, one, SUM, one.parameter.grad)
            else:
                one.parameter.grad = self._from_first(step, number, one, SUM)
        self._channel.drain()  # what was sent may now be reduced in place

    def _summed(self, step: int, number: int, one: Tied) -> Tensor | None:
        """The sum of all copies' gradients, in the order of stages."""
        total = one.parameter.grad
        for place in one.places[1:]:
            more = self._channel.receive(self._peers[place], Key(step, Slot.TIED, number, PART))
            if more is not None:
                total = more if total is None else total.add_(more)
        return total

    def _is_first(self, one: Tied) -> bool:
        return one.places[0] == self._place

    def _tell(self, step: int, number: int, one: Tied, what: int, value: Tensor | None) -> None:
        for place in one.places[1:]:
            self._channel.send(self._peers[place], Key(step, Slot.TIED, number, what), value)

    def _from_first(self, step: int, number: int, one: Tied, what: int) -> Tensor:
        key = Key(step, Slot.TIED, number, what)
        found: Tensor = self._channel.receive(self._peers[one.places[0]], key)
        return found
