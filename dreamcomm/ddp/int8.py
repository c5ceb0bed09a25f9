"""A communication hook that sends gradients as int8, with error feedback.

Ranks cannot add each other's int8 values, because each rank has scales of its own. So the hook
reduces in two steps (as the quantized reduce of ZeRO++, Wang et al. 2023, and the compressed
all_reduce of 1-bit Adam, Tang et al. 2021)::

    each rank   gradient + residual -> int8 and a scale for each block of 2,048; its error stays
    all_to_all  rank r gets the r-th part of all ranks
    rank r      adds in float32 in rank order, divides -> int8 and scales; its error stays
    all_gather  all ranks get all parts, and the same bytes

INVARIANT: nothing is lost in the sum over the steps. Let v_i be a rank's gradient plus residual,
and q_i what it sends. Its residual becomes v_i - q_i. The owner of a part computes the mean m of
the q_i and sends o; it adds N (m - o) to its residual. So N o plus all residuals is the sum of all
v_i.

INVARIANT: all ranks call the collectives of a pass in one order, because the thread of the
backward pass calls them. The all_to_all is over when the hook returns. The future's callback, which
runs on another thread, calls none.
"""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with classes.
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from dreamcomm.buckets.ops import unpack
from dreamcomm.ddp.hooks import State, entered
from dreamcomm.memory import empty

__all__ = ["BLOCK", "int8_feedback"]

BLOCK = 2048  # elements with one scale
SLICE_BLOCKS = 64  # that are worked on at a time, so that they stay in a core's cache
MOST = 127.0
SMALLEST = 2.0**-120  # scales below count as zero, and their blocks stay in the residual


def int8_feedback(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Averages gradients in int8 with a float32 scale for 2,048 elements, with error feedback.

    A rank sends 2(N-1)/N bytes for each element, a quarter of float32's. Each value is rounded
    twice, to 1/127 of the largest one of its block at most; both errors are kept in float32 and
    added to the next gradient. A checkpoint must hold them: see :class:`State`. A block that is not
    finite on one rank becomes NaN on all, and leaves no residual. It is for slow links between
    machines: within one, the hooks of 16 bits are faster.

    Raises:
        ValueError: as :func:`dreamcomm.hooks.bf16_feedback`.
    """
    gradient = entered(state, bucket)
    residual = state._residuals.row(bucket)
    parts = _Parts.of(gradient.numel(), dist.get_world_size(state.group))
    rank = dist.get_rank(state.group)
    values = residual.add_(gradient)  # what is not sent remains
    sent, received = parts.buffer(gradient.device), parts.buffer(gradient.device)
    for part in range(parts.world):
        for piece in parts.pieces(part):
            _quantize(piece, values, sent[part])
    if parts.world > 1:
        dist.all_to_all_single(received, sent, group=state.group)
    else:
        received.copy_(sent)
    for piece in parts.pieces(rank):
        mean = piece.mean_of(received)
        error = _quantized(mean, piece, sent[rank])
        inside = error.view(-1)[: piece.end - piece.begin]
        values[piece.begin : piece.end].add_(inside, alpha=float(parts.world))
    return _gathered(state, gradient, parts, sent[rank], received)


def _gathered(
    state: State, gradient: Tensor, parts: "_Parts", mine: Tensor, into: Tensor
) -> Future[Tensor]:
    """Sends this rank's part to all; the future has the averages. ``into`` is free again."""
    results, number, inspects = state._pass.results, state._pass.latest, state.norm_wanted

    def receive(done: "Future[list[Tensor]]") -> Tensor:
        done.value()  # raises what the collective raised
        for part in range(parts.world):
            for piece in parts.pieces(part):
                piece.write(into[part], gradient)
        if inspects:
            results[number] = unpack(gradient, [gradient], inspect=True)
        return gradient

    work = dist.all_gather(list(into.unbind()), mine, group=state.group, async_op=True)
    assert work is not None  # as it is asynchronous
    if gradient.device.type != "cpu":
        state._pass.work = work
    future: Future[Tensor] = work.get_future().then(receive)
    return future


@dataclass(frozen=True)
class _Piece:
    """Blocks of a part.

    Attributes:
        begin, end: their elements in the bucket; the last block may be longer than that.
        first, last: their blocks in the part.
        blocks: of the part, behind whose values its scales lie.
    """

    begin: int
    end: int
    first: int
    last: int
    blocks: int

    def values(self, row: Tensor) -> Tensor:
        """Their int8 values in a part's bytes."""
        return row[self.first * BLOCK : self.last * BLOCK].view(torch.int8).view(-1, BLOCK)

    def scales(self, row: Tensor) -> Tensor:
        """Their scales in a part's bytes."""
        begin = self.blocks * BLOCK
        return row[begin + 4 * self.first : begin + 4 * self.last].view(torch.float32).unsqueeze(1)

    def of(self, flat: Tensor) -> Tensor:
        """Their float32 elements of a bucket, a view where no block is cut."""
        inside = flat[self.begin : self.end]
        count = (self.last - self.first) * BLOCK
        if inside.numel() < count:
            inside = torch.nn.functional.pad(inside, (0, count - inside.numel()))
        return inside.view(-1, BLOCK)

    def mean_of(self, rows: Tensor) -> Tensor:
        """The mean of all ranks' values, added in float32 in rank order."""
        total = self.values(rows[0]).float().mul_(self.scales(rows[0]))
        for row in rows[1:]:
            total.addcmul_(self.values(row).float(), self.scales(row))
        return total.div_(len(rows))

    def write(self, row: Tensor, gradient: Tensor) -> None:
        """Writes the values that a part's bytes stand for."""
        found = self.values(row).float().mul_(self.scales(row)).view(-1)
        gradient[self.begin : self.end].copy_(found[: self.end - self.begin])


@dataclass(frozen=True)
class _Parts:
    """A bucket in as many parts as ranks, each of the same number of blocks.

    Attributes:
        numel: elements of the bucket.
        world: number of parts.
        blocks: of a part.
    """

    numel: int
    world: int
    blocks: int

    @staticmethod
    def of(numel: int, world: int) -> "_Parts":
        return _Parts(numel, world, -(-numel // (BLOCK * world)))

    def buffer(self, device: torch.device) -> Tensor:
        """Bytes of all parts, a row each: values, then scales."""
        shape = self.world, self.blocks * (BLOCK + 4)
        if device.type == "cpu":
            return empty(*shape, dtype=torch.uint8, device="cpu").zero_()
        return torch.zeros(shape, dtype=torch.uint8, device=device)

    def pieces(self, part: int) -> Iterator[_Piece]:
        """The blocks of a part that the bucket reaches into."""
        start = part * self.blocks * BLOCK
        stop = min(start + self.blocks * BLOCK, self.numel)
        for begin in range(start, stop, SLICE_BLOCKS * BLOCK):
            end = min(begin + SLICE_BLOCKS * BLOCK, stop)
            first = (begin - start) // BLOCK
            last = first - (begin - end) // BLOCK
            yield _Piece(begin, end, first, last, self.blocks)


def _quantize(piece: _Piece, values: Tensor, row: Tensor) -> None:
    """Puts a piece of float32 values into bytes; what is not sent replaces it."""
    error = _quantized(piece.of(values), piece, row)
    values[piece.begin : piece.end].copy_(error.view(-1)[: piece.end - piece.begin])


def _quantized(exact: Tensor, piece: _Piece, row: Tensor) -> Tensor:
    """Puts float32 blocks into bytes; returns what is not sent. A block's scale may be NaN."""
    scale = exact.abs().amax(1, keepdim=True).div_(MOST)
    finite = torch.isfinite(scale)
    scale = torch.where(scale < SMALLEST, torch.zeros_like(scale), scale)
    factor = torch.where((scale > 0) & finite, 1.0 / scale, torch.zeros_like(scale))
    rounded = (exact * factor).round_().clamp_(-MOST, MOST)
    scale = torch.where(finite, scale, torch.full_like(scale, float("nan")))
    everything = exact.is_cpu and bool(finite.all())  # a device would have to be waited for
    if not everything:
        rounded = torch.where(finite, rounded, torch.zeros_like(rounded))
    piece.values(row).copy_(rounded)
    piece.scales(row).copy_(scale)
    error = torch.addcmul(exact, rounded, scale, value=-1.0)
    return error if everything else torch.where(finite, error, torch.zeros_like(error))
