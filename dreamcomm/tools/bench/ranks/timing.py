"""The order of timing: rounds in which every variant has its turn, in rotating order."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from dreamcomm.tools.bench.turns import rotated

if TYPE_CHECKING:
    from dreamcomm.tools.bench.ranks.calls import Bound

FEWEST_SAMPLES, MOST_SAMPLES = 5, 200


class Sampled(Protocol):
    """The interface of variants that can be timed."""

    @property
    def name(self) -> str: ...

    def sample(self) -> list[float]:
        """Rewrites the buffers, waits for all ranks and times a burst: seconds of each call."""
        ...


def time_calls(calls: Sequence[Bound], settle: Callable[[], object] | None) -> list[float]:
    """Seconds of each single call; ``settle`` waits for work that a call leaves running."""
    clock = time.perf_counter_ns
    durations = []
    for call in calls:
        start = clock()
        call()
        if settle is not None:
            settle()
        durations.append(clock() - start)
    return [1e-9 * duration for duration in durations]


def measure(
    variants: Sequence[Sampled], budget: float, agree: Callable[[int], int]
) -> dict[str, list[float]]:
    """Times the variants in turns, about ``budget`` seconds in all.

    Args:
        agree: gives every rank rank 0's number.

    Returns:
        This rank's durations by variant.
    """
    found: dict[str, list[float]] = {variant.name: [] for variant in variants}
    with no_garbage_collection():
        play(variants, 0)
        start = time.perf_counter()
        play(variants, 1)
        samples = agree(sample_count(time.perf_counter() - start, budget))
        for turn in range(samples):
            for name, durations in play(variants, turn).items():
                found[name] += durations
    return found


def play(variants: Sequence[Sampled], turn: int) -> dict[str, list[float]]:
    """One round; its first is the one after the last round's first."""
    return {variant.name: variant.sample() for variant in rotated(variants, turn)}


def sample_count(round_seconds: float, budget: float) -> int:
    """The rounds that fit into ``budget`` seconds, within bounds."""
    return min(max(int(budget / round_seconds), FEWEST_SAMPLES), MOST_SAMPLES)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disables garbage collection, which would slow down a call."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
