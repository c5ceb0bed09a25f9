"""ZeRO: sharded optimizer state and gradients, and what they need of memory."""

from dreamcomm.zero.estimate import Estimate, estimate
from dreamcomm.zero.optimizer import ZeroOptimizer
from dreamcomm.zero.scaling import GradScaler

__all__ = ["Estimate", "GradScaler", "ZeroOptimizer", "estimate"]
