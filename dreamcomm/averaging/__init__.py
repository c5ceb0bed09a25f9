"""Models that each rank steps alone and ranks average: LocalSGD, DiLoCo and Gossip share it."""
