"""What the gradients of a tree become: one decision for all of its units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dreamcomm.buckets.averages import AVERAGE, Averages, averages_of
from dreamcomm.invariant.agreement import check_shards
from dreamcomm.ranks.parameters import find_parameters
from dreamcomm.zero.units.unit import Unit

__all__ = ["averages_given", "check_averages", "shards_given"]

WHAT = "fully_shard"


def shards_given(
    shards: int | None, seed: int, mesh: DeviceMesh, roots: Sequence[nn.Module]
) -> int:
    """The argument ``invariant_shards``; 0: none. Collective, if it is given.

    Raises:
        ValueError: the bits would depend on the number of ranks.
    """
    if shards is None:
        return 0
    if mesh.ndim != 1:
        raise ValueError(
            f"{WHAT}: invariant_shards is not supported with replicas: expected a mesh of one "
            f"dimension, got {mesh}"
        )
    group = mesh.get_group(0)
    return max(
        check_shards(shards, seed, group, root, find_parameters(root, ()), WHAT) for root in roots
    )


def averages_given(reduce: str | None, shards: int, below: Sequence[Unit]) -> Averages | None:
    """The arguments ``reduce`` and ``invariant_shards``; None: nothing was given here or below.

    Raises:
        ValueError: it is none of those that there are; units below have another.
    """
    if reduce not in (None, "mean", "tokens"):
        raise ValueError(
            f"{WHAT}: expected reduce to be 'mean' or 'tokens', got {reduce!r}; for sums call "
            "set_gradient_divide_factor(1.0)"
        )
    theirs = {one.averages for one in below if one.averages is not None}
    is_given = reduce is not None or shards > 0
    given = replace(averages_of(reduce or "mean", WHAT), shards=shards)
    own = {given} if is_given else set[Averages]()
    if len(own | theirs) > 1:
        found = ", ".join(sorted(map(str, own | theirs)))
        raise ValueError(
            f"{WHAT}: expected one reduce= and invariant_shards= for all units of a root, "
            f"got {found}"
        )
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
