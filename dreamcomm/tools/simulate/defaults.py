"""Defaults of a cluster, where neither flags nor a file set them, as text."""

HOSTS = 2
RANKS_PER_HOST = 8
LATENCY_WITHIN = "1us"
BANDWIDTH_WITHIN = "10GB/s"
LATENCY_BETWEEN = "40us"
MESSAGE_BETWEEN = "10us"
BANDWIDTH_BETWEEN = "10Gbit/s"
CHUNK_BETWEEN = "50us"
