"""Rounds in which every case has its turn, A B A B, and the time of a turn on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
Span = tuple[float, float]  # begin and end, by a clock that all processes of a host share


def rotated(names: Sequence[R], number: int) -> list[R]:
    """The names in an order that begins with another one in each round."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def take_turns(
    turns: Mapping[K, Callable[[], R]], rounds: int, warm_up: int = 0, *, rotates: bool = False
) -> dict[K, list[R]]:
    """Runs every turn once in each round; returns the results of the rounds after the warm-up.

    ``rotates``: no turn always follows the same one.
    """
    found: dict[K, list[R]] = {name: [] for name in turns}
    for number in range(warm_up + rounds):
        for name in rotated([*turns], number if rotates else 0):
            result = turns[name]()
            if number >= warm_up:
                found[name].append(result)
    return found


def spanned(call: Callable[[], object], group: dist.ProcessGroup | None = None) -> Span:
    """The begin and the end of a call that all ranks begin together."""
    dist.barrier(group)
    begin = time.perf_counter()
    call()
    return begin, time.perf_counter()


def timed(call: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
    """The seconds of a call that all ranks begin together."""
    begin, end = spanned(call, group)
    return end - begin


def together(ranks: Sequence[Mapping[K, Sequence[R]]]) -> dict[K, list[tuple[R, ...]]]:
    """The results of all ranks for each turn."""
    return {name: list(zip(*(rank[name] for rank in ranks), strict=True)) for name in ranks[0]}


def slowest(ranks: Sequence[Mapping[K, Sequence[float]]]) -> dict[K, list[float]]:
    """Seconds of each turn, from those of each rank: it is over when the last rank has ended it."""
    return {name: list(map(max, turns)) for name, turns in together(ranks).items()}


def lasted(ranks: Sequence[Mapping[K, Sequence[Span]]]) -> dict[K, list[float]]:
    """Seconds of each turn, from the first rank's begin to the last one's end."""
    return {
        name: [max(end for _, end in turn) - min(begin for begin, _ in turn) for turn in turns]
        for name, turns in together(ranks).items()
    }


def slowest_here(seconds: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """As :func:`slowest`, of one name and inside of the ranks. Collective."""
    tensor = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    found: list[float] = tensor.tolist()
    return found
