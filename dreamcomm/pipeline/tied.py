"""Parameters that several stages share on different ranks.

Each such rank holds a copy. After a step's backward passes the copies' gradients are added in the
order of stages, and all copies get the sum: they then take equal steps and stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dreamcomm._torch.overlap import same_memory
from dreamcomm.pipeline.messages.channel import Channel
from dreamcomm.pipeline.messages.key import Key, Slot

__all__ = ["Tied", "TiedWeights", "check_memory", "find_tied"]

WEIGHT, PART, SUM = 0, 1, 2  # what a message holds


@dataclass(frozen=True)
class Tied:
    """A shared parameter.

    Attributes:
        names: its name in the first stage with it, for the place of each rank that holds it, in
            the order of these stages.
    """

    names: dict[int, str]

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the ranks that hold it."""
        return tuple(self.names)


def find_tied(
    stages: Sequence[Sequence[tuple[str, nn.Parameter]]], rank_of: Sequence[int]
) -> list[Tied]:
    """The parameters that stages on different ranks share.

    Args:
        stages: each stage's parameters with their names.
        rank_of: the place of each stage's rank in the pipeline.
    """
    names: dict[int, dict[int, str]] = {}
    for stage, named in enumerate(stages):
        for name, parameter in named:
            names.setdefault(id(parameter), {}).setdefault(rank_of[stage], name)
    return [Tied(held) for held in names.values() if len(held) > 1]


def check_memory(
    stages: Sequence[Sequence[tuple[str, nn.Parameter]]], rank_of: Sequence[int]
) -> None:
    """Raises ValueError where ranks have different parameters on one memory.

    Each rank would train memory of its own, and a tie by ``.data`` would be lost. On one rank
    such parameters stay tied, as in one process.

    Args:
        stages, rank_of: as for :func:`find_tied`.
    """
    ranks: dict[int, set[int]] = {}  # by storage
    for stage, named in enumerate(stages):
        for _, one in named:
            ranks.setdefault(_storage(one), set()).add(rank_of[stage])
    several = {
        (f"{name} of stage {stage}", one)
        for stage, named in enumerate(stages)
        for name, one in named
        if len(ranks[_storage(one)]) > 1
    }
    pairs = sorted(several, key=lambda pair: pair[0])
    for numbers in same_memory(pairs, "Pipeline"):
        first = pairs[numbers[0]]
        other = next((pairs[n] for n in numbers if pairs[n][1] is not first[1]), None)
        if other is not None:
            raise ValueError(
                f"Pipeline: the parameters {first[0]} and {other[0]} are tied by .data, which "
                "stages on different ranks cannot keep: use one parameter in both places "
                "(b.weight = a.weight), or make one of them a copy (.clone())"
            )


def _storage(one: Tensor) -> int:
    """Where a parameter's memory begins; another number for each that has no address."""
    plain = type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided
    address = one.untyped_storage().data_ptr() if plain else 0
    return address or -id(one)


class TiedWeights:
    """Keeps the copies of shared parameters equal.

    Args:
        tied: the same on all ranks of the pipeline.
        module: has this rank's copies, by name.
        channel: to them.
        peers: the channel's rank for each place in the pipeline.
        place: this rank's.
    """

    def __init__(
        self,
        tied: Sequence[Tied],
        module: nn.Module,
        channel: Channel,
        peers: Sequence[int],
        place: int,
    ) -> None:
        self._module = module
        self._all = [(number, one) for number, one in enumerate(tied) if place in one.places]
        self._channel, self._peers, self._place = channel, peers, place

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's copies."""
        return [self._copy(one) for _, one in self._all]

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Those of which an earlier stage's rank holds a copy."""
        return [self._copy(one) for _, one in self._all if not self._is_first(one)]

    def _copy(self, one: Tied) -> nn.Parameter:
        return self._module.get_parameter(one.names[self._place])

    def copy_weights(self, step: int) -> None:
        """Gives all copies the first one's values. Collective in the pipeline."""
        with torch.no_grad():
            for number, one in self._all:
                parameter = self._copy(one)
                if parameter.is_meta:
                    continue  # it has no values yet
                if self._is_first(one):
                    self._tell(step, number, one, WEIGHT, parameter.detach())
                else:
                    weight = self._from_first(step, number, one, WEIGHT)
                    assert weight is not None
                    parameter.copy_(weight)
        self._channel.drain()

    def add_gradients(self, step: int) -> None:
        """Gives all copies the sum of their gradients. Collective in the pipeline.

        A frozen copy has none of this step. What it has of an earlier one stays.
        """
        for number, one in self._all:
            if not self._is_first(one):
                key = Key(step, Slot.TIED, number, PART)
                self._channel.send(self._peers[one.places[0]], key, _gradient(self._copy(one)))
        for number, one in self._all:
            parameter = self._copy(one)
            if self._is_first(one):
                total = self._summed(step, number, one)
                self._tell(step, number, one, SUM, total)
            else:
                total = self._from_first(step, number, one, SUM)
            if parameter.requires_grad:
                parameter.grad = total
        self._channel.drain()  # what was sent may now be reduced in place

    def _summed(self, step: int, number: int, one: Tied) -> Tensor | None:
        """The sum of all copies' gradients, in the order of stages."""
        total = _gradient(self._copy(one))
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

    def _from_first(self, step: int, number: int, one: Tied, what: int) -> Tensor | None:
        key = Key(step, Slot.TIED, number, what)
        found: Tensor | None = self._channel.receive(self._peers[one.places[0]], key)
        return found


def _gradient(copy: nn.Parameter) -> Tensor | None:
    return copy.grad if copy.requires_grad else None
