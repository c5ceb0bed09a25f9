"""Checks the matrices of weights that a user gives to gossip."""

from __future__ import annotations

import math
from typing import Any

from dreamcomm.gossip.topology import Matrix, Topology, named_topology

__all__ = ["given_topology"]

CLOSE = 1e-6  # of sums to 1
MIXES = 1 - 1e-9  # at most what a period leaves of the ranks' differences


def given_topology(name: str, weights: Any, ranks: int) -> Topology:
    """The topology of this name or, if there are weights, of these.

    Args:
        name: see :func:`named_topology`.
        weights: None; or a matrix with a row and a column for each rank, as a tensor or as nested
            sequences; or a sequence of such matrices.
        ranks: of the group.

    Raises:
        ValueError: the matrices have another shape, a negative or not finite entry, a row or column
            that does not sum to 1 within 1e-6; or ranks stay apart however long they average.
        TypeError: the weights are no numbers.
    """
    if weights is None:
        return named_topology(name, ranks)
    given = _several(weights)
    if not given:
        raise ValueError("weights: expected a matrix or a sequence of matrices, got none")
    labels = [_label(number, len(given)) for number in range(len(given))]
    made = Topology(
        tuple(_shaped(one, label, ranks) for one, label in zip(given, labels, strict=True))
    )
    for matrix, label in zip(made.matrices, labels, strict=True):
        _check_entries(matrix, label)
    _check_connected(made)
    return made


def _several(weights: Any) -> list[Any]:
    """The matrices as nested lists: a matrix is one."""
    nested = _nested(weights)
    if not isinstance(nested, list) or not all(isinstance(part, list) for part in nested):
        raise TypeError(
            "weights: expected a matrix, or a sequence of matrices, got "
            f"{type(weights).__name__}: {weights!r:.80}"
        )
    holds_matrices = any(isinstance(one, list) for part in nested for one in part)
    return nested if holds_matrices or not nested else [nested]


def _nested(weights: Any) -> Any:
    """Lists for tensors, arrays and sequences."""
    if hasattr(weights, "tolist"):
        return weights.tolist()
    return [_nested(one) for one in weights] if isinstance(weights, list | tuple) else weights


def _label(number: int, count: int) -> str:
    return "weights" if count == 1 else f"weights[{number}]"


def _shaped(matrix: Any, label: str, ranks: int) -> Matrix:
    """One matrix, with its number of rows and columns checked."""
    if len(matrix) != ranks:
        raise ValueError(
            f"{label}: it has {len(matrix)} rows, and the group {ranks} ranks; give each rank a "
            "row and a column"
        )
    for place, row in enumerate(matrix):
        if not isinstance(row, list) or not all(_is_number(one) for one in row):
            raise TypeError(f"{label}: row {place} is not made of numbers: {row!r:.80}")
        if len(row) != ranks:
            raise ValueError(
                f"{label}: row {place} has {len(row)} entries, and the group {ranks} ranks; give "
                "each rank a row and a column"
            )
    return tuple(tuple(float(one) for one in row) for row in matrix)


def _is_number(one: Any) -> bool:
    return isinstance(one, int | float) and not isinstance(one, bool)


def _check_entries(matrix: Matrix, label: str) -> None:
    for row, entries in enumerate(matrix):
        for column, entry in enumerate(entries):
            if not 0 <= entry < math.inf:
                raise ValueError(
                    f"{label}: row {row}, column {column} is {entry:g}; expected entries from 0 on"
                )
    columns = zip(*matrix, strict=True)
    _check_sums("row", [math.fsum(row) for row in matrix], label)
    _check_sums("column", [math.fsum(column) for column in columns], label)


def _check_sums(kind: str, sums: list[float], label: str) -> None:
    changes = {"row": "equal parameters", "column": "the mean over the ranks"}[kind]
    for place, total in enumerate(sums):
        if abs(total - 1.0) > CLOSE:
            raise ValueError(
                f"{label}: {kind} {place} sums to {total:.9g}, and not to 1: {changes} would change"
            )


def _check_connected(topology: Topology) -> None:
    """Raises ValueError if ranks never become equal."""
    reached, new = {0}, [0]
    while new:
        rank = new.pop()
        for number in range(topology.period):
            peers = {peer for peer, _ in topology.sources(rank, number)}
            peers |= set(topology.targets(rank, number))
            new += peers - reached
            reached |= peers
    apart = sorted(set(range(topology.ranks)) - reached)
    if apart:
        raise ValueError(
            f"weights: rank {apart[0]} never averages with rank 0, not through others either "
            f"(apart from rank 0: {apart}); connect all ranks within the sequence"
        )
    if topology.contraction() > MIXES:
        raise ValueError(
            "weights: ranks exchange their parameters and never become equal, as their "
            "differences do not shrink; give ranks a weight for their own parameters (a diagonal)"
        )
