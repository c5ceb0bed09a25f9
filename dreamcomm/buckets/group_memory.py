"""What a group's backend does with gradients: whether it averages, and reduces them in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dreamcomm._torch.groups import ours
from dreamcomm.backend import heap_bytes
from dreamcomm.info import averages

__all__ = ["OWN_BYTES", "GroupMemory", "group_memory"]

# Gradients of so many bytes are reduced where autograd makes them. Below, a copy into a bucket
# costs less than a part of its own in the collective.
OWN_BYTES = 128 << 10


@dataclass(frozen=True)
class GroupMemory:
    """How a group reduces gradients on one device.

    Attributes:
        averages: the group adds and divides itself, and rounds once.
        own_bytes: gradients from so many bytes on are born in the heap and reduced in it; 0: none.
    """

    averages: bool
    own_bytes: int


def group_memory(group: dist.ProcessGroup, device: torch.device) -> GroupMemory:
    """Collective at a group's first call on a GPU."""
    backend = ours(group, device)
    if backend is None or (device.type == "cpu" and not backend.shares_memory):
        return GroupMemory(averages=False, own_bytes=0)
    small = torch.zeros(1, device=device)
    shares = device.type == "cpu" and heap_bytes() > 0
    return GroupMemory(averages(small, group), OWN_BYTES if shares else 0)
