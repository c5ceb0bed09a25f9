"""Gives all ranks the rows that others have stepped, where the ranks do not share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from dreamcomm.buckets.layout import gather_rows
from dreamcomm.ranks.pieces import runs
from dreamcomm.zero.shards import ParameterShard

__all__ = ["gather_parameters"]

BYTES = 25 << 20  # of one message's whole result


def gather_parameters(shards: Sequence[ParameterShard], group: dist.ProcessGroup) -> None:
    """Fills in the other ranks' rows of the parameters. Collective.

    Args:
        shards: of the parameters that were stepped: the same on all ranks, in one order.
        group: its ranks have the other rows.
    """
    sharded = [one for one in shards if not one.replicated and one.parameter.numel() > 0]
    for run in runs([one.parameter for one in sharded], BYTES):
        gather_rows([sharded[number].parameter for number in run], group)
