"""Buckets of gradients: what DistributedDataParallel's hooks and sharded training share."""
