"""Training with fewer messages: ranks average now and then, or with a few others."""

from dreamcomm.local_sgd.diloco import DiLoCo
from dreamcomm.local_sgd.gossip import Gossip, GossipError, GossipReport
from dreamcomm.local_sgd.local_sgd import LocalSGD

__all__ = ["DiLoCo", "Gossip", "GossipError", "GossipReport", "LocalSGD"]
