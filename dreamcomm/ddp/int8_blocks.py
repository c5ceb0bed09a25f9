"""Blocks of float32 elements as bytes: int8 values, and a scale for each block.

A block has 2,048 elements. A row holds the values of some blocks and, behind them, their scales, so
that one message carries both. Intervals of a bucket's elements are given as ``range``; they begin
at the begin of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dreamcomm.memory import empty

BLOCK = 2048  # elements with one scale
MOST = 127.0
SMALLEST = 2.0**-120  # scales below count as zero, and what they stand for is not sent
# Blocks that are worked on at a time: on a CPU they and what is made of them stay in a core's
# cache, on a device few kernels are enough.
SLICE_ON_CPU, SLICE_ON_DEVICE = 64, 4096


class Rows:
    """Rows of equally many blocks, for or from one rank each.

    Attributes:
        blocks: of a row.
        bytes: uint8, a row for each rank.
    """

    def __init__(self, count: int, blocks: int, device: torch.device) -> None:
        shape = count, blocks * (BLOCK + 4)
        self.blocks = blocks
        self.bytes = (
            empty(*shape, dtype=torch.uint8, device="cpu")  # in the shared heap
            if device.type == "cpu"
            else torch.empty(shape, dtype=torch.uint8, device=device)
        )

    def views(self, row: int, part: range, piece: range) -> tuple[Tensor, Tensor]:
        """The int8 values of a piece, [blocks, 2048], and its scales, [blocks, 1].

        Args:
            row: holds ``part``.
            part: elements.
            piece: those of them that are asked for.
        """
        first = (piece.start - part.start) // BLOCK
        last = first + blocks_in(piece)
        line, scales = self.bytes[row], self.blocks * BLOCK
        values = line[first * BLOCK : last * BLOCK].view(torch.int8).view(-1, BLOCK)
        return values, line[scales + 4 * first : scales + 4 * last].view(torch.float32).view(-1, 1)

    def add_up(self, part: range, piece: range, out: Tensor, scratch: Tensor) -> Tensor:
        """The sum of all rows' values of a piece in ``out``, in float32, in the rows' order."""
        values, scales = self.views(0, part, piece)
        torch.mul(values, scales, out=out)
        for row in range(1, len(self.bytes)):
            values, scales = self.views(row, part, piece)
            out.addcmul_(scratch.copy_(values), scales)
        return out

    def write(self, row: int, part: range, target: Tensor) -> None:
        """Writes the values of a part into its elements of ``target``, a flat bucket."""
        for piece in slices(part, target.device):
            values, scales = self.views(row, part, piece)
            place = target[piece.start : piece.stop]
            if len(piece) % BLOCK == 0:
                torch.mul(values, scales, out=place.view(-1, BLOCK))
            else:
                place.copy_((values * scales).view(-1)[: len(piece)])


def blocks_in(elements: range) -> int:
    """How many blocks hold them; the last one may be cut."""
    return -(-len(elements) // BLOCK)


def slice_of(device: torch.device) -> int:
    """Blocks of a slice there."""
    return SLICE_ON_CPU if device.type == "cpu" else SLICE_ON_DEVICE


def slices(elements: range, device: torch.device) -> Iterator[range]:
    """The elements in the pieces that are worked on at a time there."""
    step = slice_of(device) * BLOCK
    for begin in range(elements.start, elements.stop, step):
        yield range(begin, min(begin + step, elements.stop))


def compress(
    exact: Tensor, values: Tensor, scales: Tensor, scratch: Tensor, dtype: torch.dtype
) -> None:
    """Rounds blocks to int8, to nearest even; what gets lost replaces them.

    A block that is not finite gets NaN as its scale, and leaves nothing.

    Args:
        exact: float32, [blocks, 2048].
        values: int8, [blocks, 2048], is written.
        scales: float32, [blocks, 1], is written: the largest absolute value of a block over 127.
        scratch: as ``exact``, is written.
        dtype: what the receivers round to once more.
    """
    scale = torch.maximum(exact.amax(1, keepdim=True), exact.amin(1, keepdim=True).neg_())
    scale.div_(MOST)
    scale.masked_fill_(scale < SMALLEST, 0.0)
    torch.mul(exact, scale.reciprocal().masked_fill_(scale == 0.0, 0.0), out=scratch).round_()
    broken = ~scale.isfinite()
    # A device is not asked, as the host would have to wait for it.
    any_broken = not exact.is_cpu or bool(broken.any())
    if any_broken:
        scale.masked_fill_(broken, torch.nan)
        scratch.masked_fill_(broken, 0.0)
    values.copy_(scratch)
    scales.copy_(scale)
    if dtype.itemsize == 2:
        exact.sub_(scratch.mul_(scale).to(dtype))
        exact.masked_fill_(~exact.isfinite(), 0.0)  # float16 may overflow
    else:
        exact.addcmul_(scratch, scale, value=-1.0)
        if any_broken:
            exact.masked_fill_(broken, 0.0)
