"""Timeouts that torch cannot read: it takes a timedelta as microseconds in 64 bits.

A longer one, such as ``timedelta.max``, wraps around, and is over at once.
"""

from __future__ import annotations

from datetime import timedelta
from math import inf

FOR_EVER = timedelta(days=36_500)  # as csrc/c10d/base/convert.h


def bounded(given: timedelta | float) -> timedelta:
    """The timeout of so many seconds, FOR_EVER at the most. Raises ValueError for inf and nan."""
    if isinstance(given, timedelta):
        return min(given, FOR_EVER)
    most = FOR_EVER.total_seconds()
    if not -inf < given < inf:  # not isfinite, which has no answer for the largest int
        raise ValueError(f"expected a finite number of seconds, got {given}")
    return timedelta(seconds=max(-most, min(given, most)))
