"""The table of collectives: shapes, results and bus factors. Pure.

The size of a call is that of nccl-tests: the bytes of the largest tensor of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ROOT = 0


@dataclass(frozen=True)
class Operation:
    """One collective.

    Attributes:
        input_is_part, output_is_part: that tensor has one of ``world`` parts of the size.
        in_place: whether it can run in place; the first is usual.
        bus: busbw / algbw for a world size, as nccl-tests defines it.
    """

    name: str
    bus: Callable[[int], float]
    in_place: tuple[bool, ...]
    input_is_part: bool = False
    output_is_part: bool = False

    def input_length(self, total: int, world: int) -> int:
        """Elements of the input, where ``total`` is the size in elements."""
        return total // world if self.input_is_part else total

    def output_length(self, total: int, world: int) -> int:
        """Elements of the output; see :meth:`input_length`."""
        return total // world if self.output_is_part else total


@dataclass(frozen=True)
class ResultPiece:
    """A run of a result: the sum of the same run of the inputs of ``ranks``, from ``start`` on."""

    ranks: tuple[int, ...]
    start: int
    length: int


def whole(world: int) -> float:
    """Every byte crosses the bus once."""
    return 1.0


def others(world: int) -> float:
    """All parts except a rank's own cross the bus."""
    return (world - 1) / world


def twice_others(world: int) -> float:
    """The other ranks' parts cross the bus once to be summed, and once back."""
    return 2 * (world - 1) / world


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", twice_others, (True,)),
        Operation("reduce_scatter", others, (False, True), output_is_part=True),
        Operation("all_gather", others, (False, True), input_is_part=True),
        Operation("broadcast", whole, (True,)),
        Operation("reduce", whole, (True,)),
        Operation("all_to_all", others, (False,)),
        Operation("barrier", whole, (True,)),
    )
}


def result_pieces(op: str, rank: int, world: int, total: int) -> list[ResultPiece]:
    """The expected output of ``rank``, first to last; empty where it is undefined."""
    everyone = tuple(range(world))
    part = total // world
    if op == "all_reduce" or (op == "reduce" and rank == ROOT):
        return [ResultPiece(everyone, 0, total)]
    if op == "broadcast":
        return [ResultPiece((ROOT,), 0, total)]
    if op == "reduce_scatter":
        return [ResultPiece(everyone, rank * part, part)]
    if op == "all_gather":
        return [ResultPiece((source,), 0, part) for source in everyone]
    if op == "all_to_all":
        return [ResultPiece((source,), rank * part, part) for source in everyone]
    return []
