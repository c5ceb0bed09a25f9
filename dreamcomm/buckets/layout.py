"""Which rows of each parameter a rank owns: a pure function of shapes, world size and rank.

A parameter is sharded on dimension 0 by torch.chunk's rule, as FSDP2 and DTensor's ``Shard(0)`` do:
every rank has ``ceil(rows / world)`` rows until none are left (csrc/c10d/buckets/layout.h). A
rank's shard of a list of parameters is its rows of each of them, one after the other::

    rows of a (5) and b (3), world 2:    a0 a1 a2 | a3 a4      b0 b1 | b2

    rank 0:   a0 a1 a2 b0 b1
    rank 1:   a3 a4 b2

Rank 0 has no fewer rows of any parameter than the others, and the last ranks may have none. A
scalar has no dimension to shard, so every rank has all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from dreamcomm.ranks.pieces import runs

__all__ = ["RankRows", "gather_rows", "is_replicated", "shard_layout", "shard_rows", "shard_shape"]

GATHERED_BYTES = 25 << 20  # of one collective's whole result


@dataclass(frozen=True)
class RankRows:
    """One parameter's part on one rank. An empty part has equal ``begin`` and ``end``.

    Attributes:
        begin: first row.
        end: first row beyond.
        offset: first element in the parameter, as if it were contiguous.
        numel: number of elements.
        place: first element in the rank's flat shard of the list.
    """

    begin: int
    end: int
    offset: int
    numel: int
    place: int


def shard_rows(rows: int, world: int, rank: int) -> tuple[int, int]:
    """The first row that a rank owns, and the first beyond. Both are ``rows`` where it owns none.

    Raises:
        ValueError: ``rows`` is negative, ``world`` is below 1, or ``rank`` is outside the world.
    """
    _check("shard_rows", world, rank)
    if rows < 0:
        raise ValueError(f"shard_rows: expected at least 0 rows, got {rows}")
    return _rows(rows, world, rank)


def is_replicated(shape: Sequence[int]) -> bool:
    """Whether every rank has the whole parameter: a scalar, of no dimension.

    Raises:
        ValueError: a size is negative.
    """
    _check_shape("is_replicated", shape)
    return len(shape) == 0


def shard_layout(shapes: Sequence[Sequence[int]], world: int, rank: int) -> list[RankRows]:
    """A rank's part of each parameter of a list, in the list's order.

    Args:
        shapes: of the whole parameters.
        world: number of ranks.
        rank: the one whose shard it is.

    Raises:
        ValueError: a size is negative, ``world`` is below 1, or ``rank`` is outside the world.
    """
    _check("shard_layout", world, rank)
    pieces = []
    place = 0
    for shape in shapes:
        _check_shape("shard_layout", shape)
        begin, end = _rows(shape[0], world, rank) if shape else (0, 1)
        width = math.prod(shape[1:])  # elements a row; 1 for a scalar
        piece = RankRows(begin, end, begin * width, (end - begin) * width, place)
        pieces.append(piece)
        place += piece.numel
    return pieces


def shard_shape(shape: Sequence[int], world: int, rank: int) -> tuple[int, ...]:
    """The shape of a rank's part of a parameter; a scalar's is its own.

    Raises:
        ValueError: a size is negative, ``world`` is below 1, or ``rank`` is outside the world.
    """
    _check("shard_shape", world, rank)
    _check_shape("shard_shape", shape)
    if not shape:
        return ()
    begin, end = _rows(shape[0], world, rank)
    return (end - begin, *shape[1:])


def gather_rows(wholes: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fills in the other ranks' rows. Collective.

    Args:
        wholes: dense, with rows that lie in memory one after the other: the same on all ranks, in
            one order. Scalars, of which each rank has all, and empty ones are left as they are.
        group: its ranks have the other rows.
    """
    from dreamcomm import _C

    held = [one for one in wholes if one.dim() > 0 and one.numel() > 0]
    for run in runs(held, GATHERED_BYTES):
        _C.gather_rows(group, [held[number] for number in run])


def _rows(rows: int, world: int, rank: int) -> tuple[int, int]:
    from dreamcomm import _C

    return _C.rows_of_rank(rows, world, rank)


def _check(what: str, world: int, rank: int) -> None:
    if world < 1:
        raise ValueError(f"{what}: expected a world of at least 1 rank, got {world}")
    if not 0 <= rank < world:
        raise ValueError(f"{what}: expected a rank from 0 to {world - 1}, got {rank}")


def _check_shape(what: str, shape: Sequence[int]) -> None:
    if any(size < 0 for size in shape):
        raise ValueError(f"{what}: expected sizes of at least 0, got the shape {tuple(shape)}")
