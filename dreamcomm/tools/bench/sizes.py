"""Sizes in bytes as text: "32KiB", "1MiB", "512"."""

from __future__ import annotations

import re

UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
WRITTEN = re.compile(r"(\d+)\s*(?:([kmg])(?:ib|b)?|b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Reads a number of bytes; K, KB and KiB all mean 1024.

    Raises:
        ValueError: it is no size, or none above 0.
    """
    found = WRITTEN.fullmatch(text.strip())
    size = int(found[1]) * UNITS[(found[2] or "").lower()] if found else 0
    if size < 1:
        raise ValueError(f"{text!r} is not a size: write bytes as 512, 32KiB, 1MiB or 2GiB")
    return size


def format_size(size: int) -> str:
    """Writes a number of bytes in the largest unit that keeps it exact."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def steps(least: int, most: int, factor: int) -> tuple[int, ...]:
    """``least`` and its multiples by powers of ``factor``, up to ``most``.

    Raises:
        ValueError: the range is empty or the factor does not grow.
    """
    if factor < 2:
        raise ValueError(f"the factor between sizes must be 2 or more, got {factor}")
    if least > most:
        raise ValueError(
            f"the smallest size, {format_size(least)}, is above the largest, {format_size(most)}"
        )
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)
