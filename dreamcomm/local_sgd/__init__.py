"""Training with fewer messages: ranks step apart, and average now and then."""

from dreamcomm.local_sgd.diloco import DiLoCo
from dreamcomm.local_sgd.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
