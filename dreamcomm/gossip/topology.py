"""Who averages with whom in gossip: matrices of weights. Pure functions.

In round k rank i takes row i of a matrix W: its new parameters are sum_j W[i][j] * (rank j's).
Rows sum to 1, so equal parameters stay; columns sum to 1, so the mean over all ranks stays. A
topology is a sequence of matrices, used in turn::

    "ring", 4 ranks          "shift_one", 4 ranks          "exponential", 4 ranks
    in each round            round 0        round 1        round 0        round 1
    1/3 1/3  .  1/3          1/2  .  1/2  .   1/2  .   .  1/2   1/2  .   .  1/2   1/2  .  1/2  .
    1/3 1/3 1/3  .            .  1/2  .  1/2   .  1/2 1/2  .    1/2 1/2  .   .     .  1/2  .  1/2
     .  1/3 1/3 1/3          1/2  .  1/2  .    .  1/2 1/2  .     .  1/2 1/2  .    1/2  .  1/2  .
    1/3  .  1/3 1/3           .  1/2  .  1/2  1/2  .   .  1/2    .   .  1/2 1/2    .  1/2  .  1/2

"ring" is that of D-PSGD (Lian et al. 2017), "shift_one" that of Bagua (Gan et al. 2021), and
"exponential" the one-peer exponential graph (Assran et al. 2019; Ying et al. 2021), whose messages
go one way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["TOPOLOGIES", "Matrix", "Topology", "named_topology"]

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Topology:
    """A sequence of matrices, used in turn.

    Attributes:
        matrices: at least one; each has a row for each rank, and its rows and columns sum to 1.
    """

    matrices: tuple[Matrix, ...]

    @property
    def ranks(self) -> int:
        return len(self.matrices[0])

    @property
    def period(self) -> int:
        """Rounds until the first matrix is used again."""
        return len(self.matrices)

    def matrix(self, number: int) -> Matrix:
        """That of a round, from 0 on."""
        return self.matrices[number % self.period]

    def sources(self, rank: int, number: int) -> tuple[tuple[int, float], ...]:
        """The other ranks whose parameters a rank takes in a round, in order, with weights."""
        row = self.matrix(number)[rank]
        return tuple((peer, w) for peer, w in enumerate(row) if w > 0 and peer != rank)

    def targets(self, rank: int, number: int) -> tuple[int, ...]:
        """The other ranks that take a rank's parameters in a round."""
        matrix = self.matrix(number)
        return tuple(peer for peer in range(self.ranks) if matrix[peer][rank] > 0 and peer != rank)

    @cached_property
    def stretch(self) -> float:
        """The smallest number m with ``|L x|^2 <= m <x, L x>`` for all x and each L = I - W.

        For symmetric matrices it is the spectral norm of L. It is at most 2, and 0 only if no rank
        takes anything from another.
        """
        return max(_stretch(_tensor(matrix)) for matrix in self.matrices)

    def contraction(self, damping: float = 1.0) -> float:
        """The factor by which the ranks' differences shrink in a period, in the long run.

        It is the largest absolute eigenvalue of the product of all (1 - damping) I + damping W,
        beside the one that belongs to equal parameters.
        """
        n = self.ranks
        product = torch.eye(n, dtype=torch.float64, device="cpu")
        for matrix in self.matrices:
            product = (
                torch.lerp(
                    torch.eye(n, dtype=torch.float64, device="cpu"), _tensor(matrix), damping
                )
                @ product
            )
        return float(torch.linalg.eigvals(product - 1.0 / n).abs().max())


def _tensor(matrix: Matrix) -> Tensor:
    return torch.tensor(matrix, dtype=torch.float64, device="cpu")


def _stretch(matrix: Tensor) -> float:
    """One matrix's: the squared norm of L S^(-1/2), with S the symmetric part of L.

    S is positive semidefinite, as W does not lengthen a vector. Where S takes a vector to 0, L does
    too: <x, W x> = <x, x> holds only if W x = x. So directions whose eigenvalue is 0 are left out.
    """
    difference = torch.eye(len(matrix), dtype=torch.float64, device="cpu") - matrix
    values, vectors = torch.linalg.eigh((difference + difference.T) / 2)
    kept = values > 1e-9
    if not bool(kept.any()):
        return 0.0
    scaled = difference @ (vectors[:, kept] / values[kept].sqrt())
    return float(torch.linalg.matrix_norm(scaled, 2)) ** 2


# The known ones.


def named_topology(name: str, ranks: int) -> Topology:
    """One of :data:`TOPOLOGIES`.

    Raises:
        ValueError: there is no such topology.
    """
    if name not in TOPOLOGIES:
        known = ", ".join(map(repr, TOPOLOGIES))
        raise ValueError(f"expected topology to be one of {known}, got {name!r}")
    return Topology(TOPOLOGIES[name](ranks))


def _from_rows(rows: list[list[float]]) -> Matrix:
    return tuple(map(tuple, rows))


def _ring(ranks: int) -> tuple[Matrix, ...]:
    """Each rank with both neighbours: 1/3 each, with two ranks 1/2."""
    weight = 1.0 / min(ranks, 3)
    rows = [[0.0] * ranks for _ in range(ranks)]
    for rank in range(ranks):
        for peer in (rank - 1, rank, rank + 1):
            rows[rank][peer % ranks] = weight
    return (_from_rows(rows),)


def _full(ranks: int) -> tuple[Matrix, ...]:
    """All ranks with all."""
    return (_from_rows([[1.0 / ranks] * ranks for _ in range(ranks)]),)


def _shift_one(ranks: int) -> tuple[Matrix, ...]:
    """Pairs. With an odd number there is a virtual last rank, whose partner keeps its own."""
    half = (ranks + 1) // 2
    return tuple(_pairs(ranks, half, shift) for shift in range(half))


def _pairs(ranks: int, half: int, shift: int) -> Matrix:
    rows = [[float(peer == rank) for peer in range(ranks)] for rank in range(ranks)]
    for rank in range(half):
        peer = half + (rank + shift) % half
        if peer < ranks:
            for one in (rank, peer):
                rows[one][rank] = rows[one][peer] = 0.5
    return _from_rows(rows)


def _exponential(ranks: int) -> tuple[Matrix, ...]:
    """From the rank at distance 1, 2, 4, ... before."""
    distances = [1 << bit for bit in range((ranks - 1).bit_length())]
    return tuple(_from_distance(ranks, distance) for distance in distances or [0])


def _from_distance(ranks: int, distance: int) -> Matrix:
    rows = [[0.0] * ranks for _ in range(ranks)]
    for rank in range(ranks):
        rows[rank][rank] += 0.5
        rows[rank][(rank - distance) % ranks] += 0.5
    return _from_rows(rows)


TOPOLOGIES: dict[str, Callable[[int], tuple[Matrix, ...]]] = {
    "ring": _ring,
    "shift_one": _shift_one,
    "exponential": _exponential,
    "full": _full,
}
