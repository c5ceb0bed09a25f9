"""Training with fewer messages: ranks average now and then.

Gossip, in :mod:`dreamcomm.gossip`, has its names here too.
"""

from dreamcomm.gossip import Gossip, GossipError, GossipReport
from dreamcomm.local_sgd.diloco import DiLoCo
from dreamcomm.local_sgd.local_sgd import LocalSGD

__all__ = ["DiLoCo", "Gossip", "GossipError", "GossipReport", "LocalSGD"]
