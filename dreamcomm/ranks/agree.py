"""What ranks agree on: an error of one rank is an error of all, and some values are equal.

INVARIANT (all ranks raise, or none): what may raise on one rank alone runs inside of
:func:`exchange`, and every rank enters its collective whatever that did. A rank raises after it.
Ctrl-C leaves at once. The others wait for this rank until its process ends, or the timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

__all__ = [
    "Difference",
    "Failed",
    "exchange",
    "first_difference",
    "gather_numbers",
    "gather_objects",
    "text_of",
]

T = TypeVar("T")
MISSING = "missing"


@dataclass(frozen=True)
class Failed:
    """An error of a rank, as the others are told it.

    Attributes:
        rank: of the group.
        kind: the exception's class, such as "ValueError".
        text: the exception's.
    """

    rank: int
    kind: str
    text: str


def text_of(error: BaseException) -> str:
    """An exception's text. Its class may be the user's, and fail to give one."""
    try:
        return str(error)
    except Exception as raised:
        return f"(its text cannot be made: {type(raised).__name__})"


def gather_objects(group: dist.ProcessGroup, mine: T) -> list[T]:
    """A small value of each rank, by rank. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def gather_numbers(
    group: dist.ProcessGroup, mine: Sequence[int], device: torch.device
) -> list[list[int]]:
    """Numbers of 64 bits of each rank, by rank. Collective.

    Args:
        group: of the ranks.
        mine: equally many on all ranks.
        device: one that the group has a backend for.
    """
    sent = torch.tensor(mine, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, sent, group=group)
    return [one.tolist() for one in everyone]


def exchange(
    group: dist.ProcessGroup, make: Callable[[], T], error_of: Callable[[Failed], Exception]
) -> list[T]:
    """What ``make`` returns on each rank, by rank. Collective.

    Args:
        group: of the ranks.
        make: what it returns can be pickled.
        error_of: makes the error of the ranks that have none, of the first other one.

    Raises:
        Exception: what ``make`` raised on this rank, or ``error_of``'s.
    """
    mine: T | None = None
    own: Exception | None = None
    failed: Failed | None = None
    try:
        mine = make()
    except Exception as raised:  # also what a user's function raises
        own, failed = raised, Failed(dist.get_rank(group), type(raised).__name__, text_of(raised))
    everyone: list[Any] = gather_objects(group, (failed, mine))
    if own is not None:
        raise own
    first = next((failed for failed, _ in everyone if failed is not None), None)
    if first is not None:
        raise error_of(first)
    return [made for _, made in everyone]


class Difference(NamedTuple):
    """A fact that ranks do not have in common.

    Attributes:
        name: of the fact.
        ranks: those with each value, rank 0's value first.
    """

    name: str
    ranks: dict[str, list[int]]

    @property
    def is_of_some(self) -> bool:
        """Whether some ranks have no such fact."""
        return MISSING in self.ranks

    def __str__(self) -> str:
        parts = [f"{value} on {_numbered(ranks)}" for value, ranks in self.ranks.items()]
        return f"{self.name} is {', and '.join(parts)}"

    def between_two(self) -> str:
        """The text of the first rank with another value, and of rank 0."""
        (here, _), (there, others), *_ = self.ranks.items()
        return f"{self.name} is {there} on rank {others[0]}, and {here} on rank 0"


def first_difference(everyone: Sequence[Mapping[str, str]]) -> Difference | None:
    """The first fact that differs between ranks, or None.

    Args:
        everyone: for each rank, values by the names that errors use.
    """
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            ranks.setdefault(facts.get(name, MISSING), []).append(rank)
        if len(ranks) > 1:
            return Difference(name, ranks)
    return None


def _numbered(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
