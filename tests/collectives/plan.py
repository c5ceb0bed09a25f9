"""A random program of collectives, the same on every rank. Picklable."""

from __future__ import annotations

from dataclasses import dataclass

REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_flat")
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_flat",
    "all_gather_coalesced",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_flat",
    "send",
    "send_any",
    "shift",
)
KINDS = (*REDUCING, *MOVING, "barrier", "objects")
LAYOUTS = ("contiguous", "offset", "strided", "transposed", "heap")


@dataclass(frozen=True)
class Step:
    """One collective or message."""

    kind: str
    dtype: str
    op: str
    factor: float  # of PREMUL_SUM: rank 0's, twice that for rank 1, ...
    count: int  # elements of one block
    group: int  # index into the plan's groups
    root: int  # rank in the group: root, or source of a message
    peer: int  # rank in the group: target of a message
    tag: int
    layouts: tuple[str, ...]  # one for each rank of the world, taken in turn
    in_place: bool
    asynchronous: bool
    drain: bool  # wait for everything under way before this step
    seed: int


@dataclass(frozen=True)
class Plan:
    world: int
    groups: tuple[tuple[int, ...], ...]  # the first is the world
    steps: tuple[Step, ...]
