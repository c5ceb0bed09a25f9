"""When a round of gossip is applied, and how much of it. Pure functions.

With a bound b, the round that is sent in step k may be applied in any of the steps k to k + b, in
another one on each rank::

    b = 2        step  1    2    3    4    5
    rank 0 applies     1    2    -   3,4   5
    rank 1 applies     -    1    2    3   4,5

Each round is applied once by each rank, with the parameters that all ranks had when they sent it.
Its increments gamma * (W - I) s sum to zero over the ranks, so their mean is that of the start plus
the local steps.

Why gamma = 1 / (m (b + 1)) is stable, with m = Topology.stretch, for all delays up to b, also
random ones that differ between ranks. Let y_k be the parameters if all ranks had applied all rounds
before k, s_k what ranks send in round k, and g_k = (I - W_k) s_k. Then

    y_{k+1} = y_k - gamma g_k,    s_k = y_k + gamma sum_r D_r g_r    (r from k - b to k - 1)

where D_r keeps the entries of the ranks that have not applied round r yet: it is diagonal with
entries 0 and 1. So

    |y_{k+1}|^2 = |y_k|^2 - 2 gamma <s_k, g_k> + 2 gamma^2 sum_r <D_r g_r, g_k> + gamma^2 |g_k|^2.

By the definition of m, <s_k, g_k> >= |g_k|^2 / m; and 2 <D_r g_r, g_k> <= |g_r|^2 + |g_k|^2, where
each g_k occurs 2b times in the sum over all rounds. So over all rounds |y|^2 changes by at most

    (-2 gamma / m + gamma^2 (2b + 1)) sum_k |g_k|^2,

which is negative if gamma m (2b + 1) < 2. So the sum of |g_k|^2 is finite, all differences between
ranks vanish, and the mean stays. The chosen gamma leaves a margin of one part in 2b + 2. If all
delays are b, the limit is 2 sin(pi / (4b + 2)) / m (Levin and May 1976): for b > 0 between pi / 2
and 2 times the chosen gamma.
"""

from __future__ import annotations

import hashlib

__all__ = ["damping", "drawn_delay"]


def damping(stretch: float, bound: int) -> float:
    """The factor gamma of all increments.

    Args:
        stretch: of the topology.
        bound: the largest delay in steps. With 0 a round is applied whole: 1.
    """
    if bound == 0 or stretch == 0.0:
        return 1.0
    return min(1.0, 1.0 / (stretch * (bound + 1)))


def drawn_delay(seed: int, rank: int, step: int, bound: int) -> int:
    """A number from 0 to ``bound``, all equally likely, the same in each run and on each machine.

    In this step the rank applies all rounds that were sent at least so many steps before.
    """
    digest = hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % (bound + 1)
