"""Shapes of results: rows are those of an array's first dimension."""

from __future__ import annotations

import operator
from collections.abc import Sequence

__all__ = ["Shape", "gathered", "row_bytes", "scattered", "split_sizes"]

Shape = tuple[int, ...]


def gathered(shape: Sequence[int], ranks: int) -> tuple[Shape, Shape]:
    """The shapes that the arrays of all ranks fill, one after the other.

    Returns:
        With the ranks' rows one after the other, and with a dimension for the ranks in front. One
        number of each rank gives ``(ranks,)`` in both.
    """
    stacked = (ranks, *shape)
    return (ranks * shape[0], *shape[1:]) if shape else stacked, stacked


def scattered(shape: Sequence[int], ranks: int) -> tuple[Shape, Shape]:
    """The shapes of a rank's part: with the first dimension, and without it if it has one row.

    Raises:
        ValueError: the rows cannot be divided among the ranks.
    """
    if not shape or shape[0] % ranks:
        rows = f"{shape[0]} rows" if shape else "no dimension"
        raise ValueError(f"array: {rows} cannot be divided equally among {ranks} ranks")
    part = (shape[0] // ranks, *shape[1:])
    return part, part[1:] if part[0] == 1 else part


def row_bytes(shape: Sequence[int], item: int) -> int:
    """Bytes of a row."""
    for size in shape[1:]:
        item *= size
    return item


def split_sizes(name: str, rows: int | None, splits: Sequence[int] | None, ranks: int) -> list[int]:
    """The rows of each rank's part: as given, or equal ones.

    Args:
        name: of the argument, for errors.
        rows: of all parts; None: any number.
        splits: rows of each part, or None.
        ranks: number of parts.

    Raises:
        TypeError, ValueError: they are not one for each rank, negative, or not all rows.
    """
    if splits is None:
        if rows is None or rows % ranks:
            raise ValueError(
                f"{name}: {rows} rows cannot be divided equally among {ranks} ranks; pass splits"
            )
        return [rows // ranks] * ranks
    try:
        found = [operator.index(one) for one in splits]
    except TypeError as error:
        raise TypeError(f"{name}: expected {ranks} numbers of rows, got {splits!r}") from error
    if len(found) != ranks or min(found) < 0 or rows not in (None, sum(found)):
        of_all = "" if rows is None else f" that make {rows} rows"
        raise ValueError(f"{name}: expected {ranks} sizes from 0 on{of_all}, got {found}")
    return found
