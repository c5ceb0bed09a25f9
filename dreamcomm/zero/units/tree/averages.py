"""What the gradients of a tree become: one decision for all of its units."""

from __future__ import annotations

from collections.abc import Sequence

from dreamcomm.buckets.averages import AVERAGE, Averages, averages_of
from dreamcomm.zero.units.unit import Unit

__all__ = ["averages_given", "check_averages"]

WHAT = "fully_shard"


def averages_given(reduce: str | None, below: Sequence[Unit]) -> Averages | None:
    """The argument ``reduce``; None: nothing was given here or below.

    Raises:
        ValueError: it is none of those that there are; units below have another.
    """
    if reduce not in (None, "mean", "tokens"):
        raise ValueError(
            f"{WHAT}: expected reduce to be 'mean' or 'tokens', got {reduce!r}; for sums call "
            "set_gradient_divide_factor(1.0)"
        )
    theirs = {one.averages for one in below if one.averages is not None}
    own = {averages_of(reduce, WHAT)} if reduce is not None else set[Averages]()
    if len(own | theirs) > 1:
        found = ", ".join(sorted(map(str, own | theirs)))
        raise ValueError(f"{WHAT}: expected one reduce= for all units of a root, got {found}")
    return next(iter(own | theirs), None)


def check_averages(averages: Averages | None, why: str) -> None:
    """Raises where torch's function shards the module, which knows averages alone.

    Args:
        averages: that were given.
        why: it does.
    """
    if averages not in (None, AVERAGE):
        raise NotImplementedError(
            f"{WHAT}: {averages} is not supported where torch's function shards, as {why}"
        )
