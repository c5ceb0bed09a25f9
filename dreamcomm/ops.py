"""The two passes over a bucket of gradients: :mod:`dreamcomm.buckets.ops`."""

from dreamcomm.buckets.ops import Transfer, pack, unpack

__all__ = ["Transfer", "pack", "unpack"]
