"""The memory of DistributedDataParallel's buckets, and of FSDP2's buffers.

torch asks a group's backend for the memory of buckets only with ``DDP_DISABLE_COMM_MEM=0`` in the
environment, and then for every group of the process. Without GPUs no other backend of torch
provides such memory, so there the first group of this backend sets the variable. With GPUs the
variable would also move the buckets of NCCL's groups, so there it is left to the user.
"""

from __future__ import annotations

import os

__all__ = ["VARIABLE", "advice", "are_shared", "offer_memory"]

VARIABLE = "DDP_DISABLE_COMM_MEM"
ON = ("0", "f", "false", "n", "no")  # as torch reads it


def offer_memory() -> None:
    """Makes DDP take its buckets from its group, unless the user has set the variable."""
    if VARIABLE not in os.environ and not has_gpus():
        os.environ[VARIABLE] = "0"


def are_shared() -> bool:
    """Whether buckets of DDP on a group of this backend are in shared memory, if made now."""
    return os.environ.get(VARIABLE, "").lower() in ON


def has_gpus() -> bool:
    """Whether there is an accelerator of any kind. Does not initialise it."""
    import torch

    return torch.accelerator.device_count() > 0


def advice(op: str) -> str:
    """The text of :func:`dreamcomm.explain` on torch's own tensors in such calls, or ""."""
    if op == "all_reduce":
        if are_shared():
            return "\n  (buckets of DistributedDataParallel: in shared memory)"
        return (
            "\n  (buckets of DistributedDataParallel: in other memory; with "
            f"{VARIABLE}=0 in the environment when it is made they lie in shared memory)"
        )
    if op in ("all_gather", "reduce_scatter"):
        return (
            "\n  (buffers of FSDP2: in shared memory after "
            "set_allocate_memory_from_process_group_for_comm(True) on each of its modules)"
        )
    return ""
