"""Training in which ranks average with a few others in every step."""

from dreamcomm.gossip.gossip import Gossip, GossipError, GossipReport

__all__ = ["Gossip", "GossipError", "GossipReport"]
