"""Whether a call's result is right: against a plain reference, from seeds, piece by piece.

The values are small integers, so that every sum is exact in every dtype and in any order. No
rank ever sees another one's input: it makes it again from its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dreamcomm.tools.bench.operations import ResultPiece, result_pieces

# A prime, so that a value in the wrong place differs from the expected one.
PERIOD = 65537
CHUNK = 1 << 20
LARGEST_VALUE = 8
LARGEST_SUM = 120  # fits int8, and is exact in bfloat16

# The input of (rank, row), elements from start on: (rank, row, start, length) to integers.
Source = Callable[[int, int, int, int], Tensor]


class RandomInputs:
    """A :data:`Source` of random integers, the same in every process for the same world."""

    def __init__(self, world: int, signed: bool) -> None:
        self.limit = max(1, min(LARGEST_VALUE, LARGEST_SUM // world))
        self.least = -self.limit if signed else 0
        self.made: dict[tuple[int, int], Tensor] = {}

    def __call__(self, rank: int, row: int, start: int, length: int) -> Tensor:
        if (rank, row) not in self.made:
            generator = torch.Generator().manual_seed(1000 * rank + row)
            period = torch.randint(
                self.least,
                self.limit + 1,
                (PERIOD,),
                generator=generator,
                dtype=torch.int16,
                device="cpu",
            )
            self.made[rank, row] = period.repeat(2 + CHUNK // PERIOD)
        offset = start % PERIOD
        return self.made[rank, row][offset : offset + length]


def rewritten_inputs(rank: int, _row: int, _start: int, length: int) -> Tensor:
    """The :data:`Source` of the values that ``Buffers.rewrite`` and the core's timers write."""
    return torch.full((length,), rank + 1, dtype=torch.int16, device="cpu")


def chunks(piece: ResultPiece) -> Iterator[tuple[int, int]]:
    """Offsets in the piece and lengths, so that references need little memory."""
    for offset in range(0, piece.length, CHUNK):
        yield offset, min(CHUNK, piece.length - offset)


def fill(inputs: Tensor, rank: int, source: Source) -> None:
    """Writes ``source`` into every row of [burst, n]."""
    for row, values in enumerate(inputs):
        for offset, length in chunks(ResultPiece((rank,), 0, values.numel())):
            values[offset : offset + length].copy_(source(rank, row, offset, length))


def find_error(
    op: str, rank: int, world: int, total: int, outputs: Tensor, source: Source
) -> str | None:
    """Compares every row of ``outputs`` with the result of ``op`` on ``source``, to the last bit.

    Returns a text on the first difference, or None.
    """
    for row, values in enumerate(outputs):
        done = 0
        for piece in result_pieces(op, rank, world, total):
            for offset, length in chunks(piece):
                expected = sum_of(piece, row, offset, length, source).to(values.dtype)
                found = values[done : done + length].cpu()
                if not torch.equal(found, expected):
                    return describe(rank, row, done, found, expected)
                done += length
    return None


def sum_of(piece: ResultPiece, row: int, offset: int, length: int, source: Source) -> Tensor:
    """The reference: adds the ranks' values one after the other."""
    total = torch.zeros(length, dtype=torch.int16, device="cpu")
    for rank in piece.ranks:
        total += source(rank, row, piece.start + offset, length)
    return total


def describe(rank: int, row: int, start: int, found: Tensor, expected: Tensor) -> str:
    """Names the first element that differs."""
    at = int((found != expected).nonzero()[0])
    return (
        f"rank {rank}, call {row}, element {start + at}: expected {expected[at].item()}, "
        f"got {found[at].item()}"
    )
