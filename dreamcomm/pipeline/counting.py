"""What the gradients of a pipeline are sums over, with ``reduce="tokens"``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from dreamcomm.buckets.protocol import is_sharded
from dreamcomm.pipeline.values import Number, number_of

__all__ = ["GivenCount", "TokenWindow", "step_count"]


class GivenCount:
    """What a script says before a step that its losses are sums over."""

    def __init__(self) -> None:
        self._numbers: list[Number] = []

    def add(self, number: object, who: str) -> None:
        """Notes a count; ``who`` is for errors."""
        self._numbers.append(number_of(number, who))

    def take(self) -> Number | None:
        """The count of the step that begins, or None.

        Raises:
            ValueError: there are several.
        """
        numbers, self._numbers = self._numbers, []
        if len(numbers) > 1:
            raise ValueError(
                f"count(n) was called {len(numbers)} times before one step; call it once, with "
                "what all micro-batches count together"
            )
        return numbers[0] if numbers else None


def step_count(given: Number | None, found: Sequence[Number | None]) -> Number:
    """What a step's losses on this rank are sums over.

    Args:
        given: by the script.
        found: by the loss function, for each micro-batch.

    Raises:
        ValueError: there is none, or there are both.
    """
    own = [one for one in found if one is not None]
    if given is not None and own:
        raise ValueError(
            "the loss function returned counts, and count(n) was called before the step, too: "
            "leave one of them out"
        )
    if given is not None:
        return given
    if len(own) < len(found):
        raise ValueError(
            'there is no count: with reduce="tokens" the loss function returns (sum of losses, '
            "count), or the last stage's rank calls count(n) once before each step, with 0 where "
            "the batch has no token"
        )
    return sum(own)


@dataclass(frozen=True)
class _Mark:
    """A gradient that a step has left."""

    leaf: TensorWeakRef
    gradient: TensorWeakRef
    version: int

    def is_there(self, shards_hold: bool) -> bool:
        """Whether it was not cleared since. A script may clear it by writing zeros."""
        leaf = self.leaf()
        now = None if leaf is None else leaf.grad
        if now is None:
            return False
        if is_sharded(now):
            return shards_hold
        is_as_left = now is self.gradient() and now._version == self.version
        return is_as_left or bool((now._values() if now.is_sparse else now).any())


class TokenWindow:
    """The steps whose gradients have added up since they were cleared.

        a step under no_sync()    leaves sums, and keeps its count
        a step that reduces       divides all sums by all counts
        the next step             begins anew, once the gradients are cleared

    Args:
        adds_means: a step may add its own mean to one that an earlier step has divided.

    Attributes:
        is_divided: the gradients are means.
    """

    def __init__(self, *, adds_means: bool) -> None:
        self.adds_means, self.is_divided = adds_means, False
        self._counts: list[Number] = []
        self._leaves: dict[int, TensorWeakRef] = {}
        self._marks: list[_Mark] = []

    def holds(self, shards_hold: bool) -> bool | None:
        """Whether gradients of earlier steps are there; None: they have left none on this rank.

        Args:
            shards_hold: whether shards of gradients hold anything.
        """
        if not self._marks:
            return None
        return any(one.is_there(shards_hold) for one in self._marks)

    def begin_step(self, held: bool | None) -> None:
        """Forgets earlier steps whose gradients are cleared; ``held``: as all ranks see it."""
        if held is False or (held is None and self.is_divided):
            self._counts, self._leaves, self.is_divided = [], {}, False

    def add(self, count: Number, leaves: Sequence[Tensor]) -> None:
        """Adds a step whose sums are in the gradients of these."""
        self._counts.append(count)
        self._leaves |= {id(one): TensorWeakRef(one) for one in leaves}

    @property
    def is_empty(self) -> bool:
        """Whether there is no sum that is not divided yet."""
        return not self._counts

    @property
    def total(self) -> Number:
        """The count of all sums."""
        return sum(self._counts)

    def leaves(self) -> list[Tensor]:
        """What has them."""
        return [leaf for one in self._leaves.values() if (leaf := one()) is not None]

    def end(self) -> None:
        """All is divided."""
        self._counts, self._leaves, self.is_divided = [], {}, True

    def mark(self, leaves: Sequence[Tensor]) -> None:
        """Notes the gradients that a step has left."""
        self._marks = [
            _Mark(TensorWeakRef(one), TensorWeakRef(one.grad), one.grad._version)
            for one in leaves
            if one.grad is not None
        ]
