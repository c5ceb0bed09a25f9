"""The public name of :mod:`dreamcomm.buckets.ops`."""

from dreamcomm.buckets.ops import Transfer, pack, unpack
from dreamcomm.buckets.ops import __doc__ as __doc__

__all__ = ["Transfer", "pack", "unpack"]
