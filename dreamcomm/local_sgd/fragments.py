"""When parts of a model are synchronized: pure functions. ::

    every 6, 3 fragments     step   1  2  3  4  5  6  7  8  9 10 11 12
    fragment 0 (offset 2)              x                 x
    fragment 1 (offset 4)                    x                 x
    fragment 2 (offset 6)                          x                 x

So a step sends one fragment instead of the whole model (Douillard et al. 2025, "Streaming DiLoCo
with overlapping communication").
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["cut_fragments", "due_fragments"]


def cut_fragments(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Cuts parameters into runs whose bytes are about equal.

    A run ends where the sum of bytes so far is nearest to its share, and has at least one
    parameter.

    Args:
        sizes: bytes of each parameter, in order.
        fragments: at most one for each parameter.

    Returns:
        The numbers of each fragment's parameters.
    """
    total, sums = sum(sizes), [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    cuts = [0]
    for fragment in range(1, fragments):
        least, most = cuts[-1] + 1, len(sizes) - (fragments - fragment)
        share = total * fragment / fragments
        cuts.append(min(range(least, most + 1), key=lambda cut: abs(sums[cut] - share)))
    cuts.append(len(sizes))
    return [list(range(begin, end)) for begin, end in pairwise(cuts)]


def due_fragments(step: int, every: int, fragments: int) -> list[int]:
    """The fragments that are synchronized after a step, counted from 1."""
    return [
        fragment
        for fragment in range(fragments)
        if (step - (fragment + 1) * every // fragments) % every == 0
    ]
