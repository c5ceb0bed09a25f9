"""Puts parameters into memory that all ranks of a host map, each once.

A region is a memfd of its own for what one call shards, made by the host's lowest rank and handed
to processes of the same user. It is not a heap: it has no owner, is not used again, and lives as
long as any tensor of any rank. Each parameter begins at a multiple of 64 bytes::

    | a: rows of rank 0 | rows of rank 1 | pad | b: rows of rank 0 | rows of rank 1 | pad |

Each rank touches its own rows first. A scalar lies outside, one for each rank, and all ranks step
it: in one memory it would be stepped by each of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dreamcomm.buckets.layout import is_replicated, shard_layout
from dreamcomm.ranks.agree import Failed, exchange
from dreamcomm.zero.units.parameters.own_files import PAGE, OwnFiles
from dreamcomm.zero.units.parameters.placed import Placed, Source
from dreamcomm.zero.units.window import WindowError

if TYPE_CHECKING:
    from dreamcomm._C import Region, RegionFolder

__all__ = [
    "NoRegion",
    "any_on_ranks",
    "is_protected",
    "place",
    "place_scalar",
    "region_bytes",
]

ALIGN = 64
TAKE_SECONDS = 60.0  # the address is known: only a rank that is stopped takes so long
# 1: whole parameters are mapped read-only, so that a write to one faults where it is made.
# 2: the rows of this rank, too, while ranks read.
PROTECT = "DREAMCOMM_PROTECT_PARAMETERS"


def is_protected(level: int = 1) -> bool:
    """Whether the environment asks for this level of protection.

    Raises:
        ValueError: it asks for one that does not exist.
    """
    given = os.environ.get(PROTECT, "0")
    if given not in ("", "0", "1", "2"):
        raise ValueError(f"{PROTECT}: expected 0, 1 or 2, got {given!r}")
    return int(given or "0") >= level


def any_on_ranks(group: dist.ProcessGroup, *flags: bool) -> list[bool]:
    """Whether each flag is set on any rank. Collective."""
    from dreamcomm import _C

    return list(_C.any_of(group, list(flags)))


def region_bytes(sources: Sequence[Source], align: int = ALIGN) -> tuple[list[int], int]:
    """Where each parameter begins in a region, and how many bytes it has. Scalars lie outside."""
    offsets, end = [], 0
    for one in sources:
        offsets.append(end)
        if not is_replicated(one.shape):
            end += -(-math.prod(one.shape) * one.dtype.itemsize // align) * align
    return offsets, end


def make_region(
    group: dist.ProcessGroup,
    nbytes: int,
    hosts: Sequence[Sequence[int]] | None = None,
    folder: RegionFolder | None = None,
) -> Region:
    """Memory that all ranks of a host map. Collective.

    Args:
        group: all ranks.
        nbytes: of the region.
        hosts: the ranks of each host; None: there is one.
        folder: of the file that is mapped; None: it is memory.

    Raises:
        NoRegion: a rank cannot map it; on all ranks.
    """
    rank = dist.get_rank(group)
    first = min(next((one for one in hosts or () if rank in one), [0]))
    try:
        return _make_region(group, nbytes, first, folder)
    except NoRegion:
        raise
    except (OSError, RuntimeError) as error:  # of this rank
        raise _no_region(Failed(rank, type(error).__name__, str(error))) from error


def _make_region(
    group: dist.ProcessGroup, nbytes: int, first: int, folder: RegionFolder | None
) -> Region:
    """The host's first rank offers it; the others take it, and say so."""
    from dreamcomm import _C

    protects = is_protected()
    offers = dist.get_rank(group) == first
    offer = None

    def offered() -> str:
        nonlocal offer
        if offers:
            offer = _C.RegionOffer(nbytes, protects, folder)
        return "" if offer is None else offer.address

    region: Region | None = None
    address = exchange(group, offered, _no_region)[first]

    def taken() -> None:
        nonlocal region
        region = (
            offer.region
            if offer is not None
            else _C.take_region(address, nbytes, protects, TAKE_SECONDS, folder)
        )

    try:
        exchange(group, taken, _no_region)
    finally:
        if offer is not None:
            offer.close()
    assert region is not None
    return region


class NoRegion(WindowError):
    """The ranks cannot map one memory for parameters; raised on all of them."""


def _no_region(failed: Failed) -> Exception:
    return NoRegion(
        f"rank {failed.rank} cannot map the memory of the parameters: {failed.kind}: {failed.text}"
    )


def place(
    sources: Sequence[Source],
    group: dist.ProcessGroup,
    hosts: Sequence[Sequence[int]] | None = None,
    files: OwnFiles | None = None,
) -> list[Placed]:
    """Puts parameters of the same shapes on all ranks into one region a host. Collective.

    The values are each rank's rows; those of scalars are rank 0's. Rows of other hosts' ranks have
    no values yet.

    Args:
        files: of this rank, for rows of another type; the region is a file of their folder.
    """
    offsets, nbytes = region_bytes(sources, ALIGN if files is None else PAGE)
    region = make_region(group, nbytes, hosts, None if files is None else files.folder)
    found = []
    for one, offset in zip(sources, offsets, strict=True):
        if is_replicated(one.shape):
            found.append(place_scalar(one, group))
            continue
        (piece,) = shard_layout([one.shape], dist.get_world_size(group), dist.get_rank(group))
        begin = offset + piece.offset * one.dtype.itemsize
        strides = list(one.strides)
        sent = region.tensor(begin, list(one.rows.shape), strides, one.dtype, True)
        rows = sent
        if one.is_cast:
            make = torch.empty_strided if files is None else files.zeros
            rows = make(one.rows.shape, strides, dtype=one.rows.dtype)
        rows.copy_(one.rows.detach())
        if files is not None:
            files.wrote([rows])
        whole = region.tensor(offset, list(one.shape), strides, one.dtype, False)
        found.append(Placed(whole, rows, sent, region))
    return found


def place_scalar(source: Source, group: dist.ProcessGroup) -> Placed:
    """A tensor of no dimension: each rank has one, and all ranks step it. Collective."""
    # Its storage is its own: torch.save and others take whole storages.
    rows = source.rows.detach().clone()
    dist.broadcast(rows, group_src=0, group=group)
    if source.is_cast:
        whole = rows.to(source.dtype)
        return Placed(whole, rows, whole.view(()))
    own = rows.view(())
    return Placed(rows, own, own)
