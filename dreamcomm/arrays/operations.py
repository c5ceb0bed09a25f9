"""Collectives and operations by the numbers of the compiled core."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeAlias

import torch.distributed as dist

__all__ = ["NO_OPERATION", "OPERATIONS", "Kind", "Operation", "number_of"]

# "sum", "avg", "product", "min", "max", "band", "bor" or "bxor"; or torch's, as ReduceOp.SUM.
Operation: TypeAlias = "str | dist.ReduceOp | dist.ReduceOp.RedOpType"

NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
# Their numbers, by names and as torch's own.
OPERATIONS: dict[Any, int] = {
    **{name: number for number, name in enumerate(NAMES)},
    **{getattr(dist.ReduceOp, name.upper()): number for number, name in enumerate(NAMES)},
}
NO_OPERATION = -1


class Kind(IntEnum):
    """A collective."""

    BARRIER = 0
    BROADCAST = 1
    ALL_REDUCE = 2
    REDUCE = 3
    ALL_GATHER = 4
    GATHER = 5
    SCATTER = 6
    REDUCE_SCATTER = 7
    ALL_TO_ALL = 8


def number_of(operation: Operation) -> int:
    """The number of an operation. Raises ValueError if there is none such."""
    if isinstance(operation, (str, dist.ReduceOp.RedOpType)) and operation in OPERATIONS:
        return OPERATIONS[operation]
    for number, name in enumerate(NAMES):
        if operation == getattr(dist.ReduceOp, name.upper()):
            return number
    raise ValueError(f"op: expected one of {', '.join(NAMES)}, got {operation!r}")
