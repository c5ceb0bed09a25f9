"""Times and rates as text: "50us", "10Gbit/s", "12.5GB/s"."""

from __future__ import annotations

import re

from dreamcomm.tools.bench.sizes import format_size, parse_size

MOST_BYTES = 1 << 48  # of each rank: the model counts the bytes of the most ranks in 64 bits
MOST_SECONDS = 1e6  # of any time; more than enough, and its sums and products stay finite
MOST_PER_SECOND = 1e24  # bytes
_WRITTEN = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-zµ/]+)")
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "": 1.0}
_RATE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kKmMgGtT]?)([Bb]it|b|B)(?:/s|ps)")


def parse_time(text: str) -> float:
    """Reads a duration; returns seconds.

    Raises:
        ValueError: it is none, or more than the model is for.
    """
    found = _WRITTEN.fullmatch(text.strip())
    if found is None or found[2] not in _TIMES:
        raise ValueError(f"{shortened(text)!r} is not a time: write 0.5s, 1ms, 50us or 800ns")
    seconds = float(found[1]) * _TIMES[found[2]]
    if seconds > MOST_SECONDS:
        raise ValueError(f"the model is for up to {MOST_SECONDS:.0f}s, got {shortened(text)!r}")
    return seconds


def parse_bytes(text: str) -> int:
    """Reads a number of bytes.

    Raises:
        ValueError: it is none, or more than the model is for.
    """
    found = parse_size(text)
    if found > MOST_BYTES:
        raise ValueError(f"the model is for up to {format_size(MOST_BYTES)}, got {text!r}")
    return found


def parse_rate(text: str) -> float:
    """Reads a bandwidth with decimal units, as for networks; returns bytes per second.

    "b" means bits, as in 10Gb/s or 10Gbps, and "B" bytes.

    Raises:
        ValueError: it is no bandwidth, or beyond the model's range.
    """
    found = _RATE.fullmatch(text.strip())
    number = 0.0 if found is None else float(found[1])
    if found is None or number == 0:
        raise ValueError(
            f"{shortened(text)!r} is not a bandwidth: write 10Gbit/s, 12.5GB/s or 800MB/s"
        )
    per_second = number * _PREFIXES[found[2].lower()] / (1 if found[3] == "B" else 8)
    if not 1 <= per_second <= MOST_PER_SECOND:
        raise ValueError(
            f"the model is for 1B/s to {MOST_PER_SECOND:.0e}B/s, got {shortened(text)!r}"
        )
    return per_second


def shortened(text: str) -> str:
    """The part of the input that an error repeats."""
    return text if len(text) <= 40 else text[:37] + "..."
