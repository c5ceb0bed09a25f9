"""ZeRO: sharded optimizer state, gradients and parameters, and what they need of memory."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from dreamcomm.buckets.scaling import GradScaler
from dreamcomm.zero.checkpoint import load, save
from dreamcomm.zero.estimate import Estimate, estimate
from dreamcomm.zero.memory import MemoryReport, memory_report, process_memory
from dreamcomm.zero.optimizer import ZeroOptimizer
from dreamcomm.zero.units.api import (
    fully_shard,
    initialize,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from dreamcomm.zero.units.face import FSDPModule, UnshardHandle
from dreamcomm.zero.units.window import WindowError

__all__ = [
    "CPUOffloadPolicy",
    "Estimate",
    "FSDPModule",
    "GradScaler",
    "MemoryReport",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "WindowError",
    "ZeroOptimizer",
    "estimate",
    "fully_shard",
    "initialize",
    "load",
    "memory_report",
    "process_memory",
    "register_fsdp_forward_method",
    "save",
    "share_comm_ctx",
]
