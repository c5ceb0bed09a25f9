"""Warns of rows that are the same on all ranks, as equal seeds make them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dreamcomm.ranks.agree import gather_objects
from dreamcomm.zero.units.parameters.record import UnitParameter

__all__ = ["warn_of_equal_rows"]


def warn_of_equal_rows(records: Sequence[UnitParameter], group: dist.ProcessGroup) -> None:
    """Compares the first rows of parameters that were made on the meta device. Collective.

    ``reset_parameters()`` on a DTensor on CPUs draws from each rank's own generator. With equal
    seeds all ranks get the same rows, where one process would get others.
    """
    mine = [_first_row(one) for one in records]
    everyone = gather_objects(group, mine)
    if len(everyone) < 2:
        return
    same = [
        one.name
        for one, found in zip(records, zip(*everyone, strict=True), strict=True)
        if found[0] and found[0] == found[1]
    ]
    if same:
        warnings.warn(
            f"fully_shard: {len(same)} parameters ({', '.join(map(repr, same[:3]))}) have the same "
            "rows on ranks 0 and 1, as reset_parameters() with equal seeds makes them: initialise "
            "with dreamcomm.zero.initialize(module), which gives the values of one process",
            stacklevel=2,
        )


def _first_row(one: UnitParameter) -> bytes:
    """A digest; nothing for a row that has one value, such as zeros, or for none."""
    if one.is_replicated or one.local.numel() < 2:
        return b""
    row = one.local.detach()[0].reshape(-1).contiguous()
    if row.numel() < 2 or bool((row == row[0]).all()):
        return b""
    return hashlib.blake2b(row.view(torch.uint8).numpy().tobytes(), digest_size=8).digest()
