"""DistributedDataParallel, the same in place, and communication hooks."""
