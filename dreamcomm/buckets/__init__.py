"""Buckets of gradients: what data parallelism, its hooks and sharded training share."""
