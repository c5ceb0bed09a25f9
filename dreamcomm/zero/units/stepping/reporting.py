"""What an optimizer's parameters of fully_shard take of memory, by the form in which they lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from dreamcomm.zero.estimate import Estimate
from dreamcomm.zero.memory import MemoryReport, measured
from dreamcomm.zero.shards import ShardedGroups
from dreamcomm.zero.units.stepping.optimizer import UnitSteps

__all__ = ["plan_of", "reported"]


def plan_of(units: UnitSteps) -> dict[str, Any]:
    """Arguments of :func:`dreamcomm.zero.estimate` for the tree: types where all have the same."""
    tree = units.tree
    types = {(one.whole.dtype, one.local.dtype) for one in units.records()}
    (narrow, wide) = next(iter(types)) if len(types) == 1 else (None, None)
    return {
        "param_dtype": narrow if narrow != wide else None,
        "master_dtype": wide if narrow != wide else None,
        "hosts": tree.form.copies,
        "replicas": 1 if tree.replicas is None else dist.get_world_size(tree.replicas),
    }


def reported(
    units: UnitSteps, planned: Estimate, sharded: ShardedGroups, since: int | None
) -> MemoryReport:
    """The plan beside what there is. Units in use are planned as the largest that there were."""
    found = measured(planned, sharded, units.held(), since)
    records, form = units.records(), units.tree.form
    copies = [form.copies if not one.is_replicated else 1 for one in records]
    sent = sum(count * one.sent.nbytes for count, one in zip(copies, records, strict=True))
    return replace(
        found,
        planned=replace(planned, transient=planned.transient + form.largest_use),
        parameters=sent,
        master_parameters=sum(one.local.nbytes for one in records if one.sent is not one.local),
    )
