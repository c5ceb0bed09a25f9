"""Buckets of gradients, shared by DistributedDataParallel's hooks and sharded training."""
