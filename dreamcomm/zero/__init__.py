"""ZeRO: sharded optimizer state and gradients, and what they need of memory."""

from dreamcomm.buckets.scaling import GradScaler
from dreamcomm.zero.checkpoint import load, save
from dreamcomm.zero.estimate import Estimate, estimate
from dreamcomm.zero.memory import MemoryReport, memory_report, process_memory
from dreamcomm.zero.optimizer import ZeroOptimizer

__all__ = [
    "Estimate",
    "GradScaler",
    "MemoryReport",
    "ZeroOptimizer",
    "estimate",
    "load",
    "memory_report",
    "process_memory",
    "save",
]
