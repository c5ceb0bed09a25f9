"""A communication hook that sends gradients as int8, with error feedback.

Ranks cannot add each other's int8 values, because each rank has scales of its own. So the hook
reduces in two steps (as the quantized reduce of ZeRO++, Wang et al. 2023, and the compressed
all_reduce of 1-bit Adam, Tang et al. 2021)::

    each rank   gradient + residual -> int8 and a scale for each block of 2,048; its error stays
    all_to_all  rank r gets the r-th part of all ranks
    rank r      adds in float32 in rank order, divides -> int8 and scales; its error stays
    all_gather  all ranks get all parts, and the same bytes

On hosts of several ranks the first three lines are there twice: a host's ranks add up first.

INVARIANT: nothing is lost in the sum over the steps. Let v_i be a rank's gradient plus residual,
and q_i what it sends. Its residual becomes v_i - q_i. A rank that adds up the values of its host's
ranks, and sends the sum s as t, adds s - t to its residual. The rank that computes the mean m, and
sends o, adds N (m - o); o is what the gradients become in their own dtype. So N o plus all
residuals is the sum of all v_i.

INVARIANT: all ranks call the collectives of a pass in one order, because the thread of the
backward pass calls them. The all_to_all is over when the hook returns. The future's callback, which
runs on another thread, calls none.
"""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with classes.
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from dreamcomm._torch.groups import given_group, ours
from dreamcomm.ddp.backward_pass import unpack_inspected
from dreamcomm.ddp.hooks import State, captures, entered, inspected_lengths
from dreamcomm.ddp.int8_blocks import BLOCK, Rows, blocks_in, compress, slice_of, slices
from dreamcomm.ddp.int8_parts import Parts, Stage

__all__ = ["int8_feedback"]

# Puts the values of some elements into blocks of float32; the other blocks are scratch.
_Source: TypeAlias = Callable[[range, Tensor, Tensor], object]


def int8_feedback(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Averages gradients in int8 with a float32 scale for 2,048 elements, with error feedback.

    A rank sends 2(N-1)/N bytes for each element, a quarter of float32's. H hosts with equally many
    ranks send 2(H-1)/H bytes each to others, if dreamcomm has the group. Each value is rounded
    twice, and once more between such hosts, by 1/254 of the largest one of its block at most. The
    errors are kept in float32 and added to the next gradient, as by
    :func:`dreamcomm.hooks.bf16_feedback`; a checkpoint must hold them: see :class:`State`. A block
    that is not finite on one rank becomes NaN on all, and leaves no residual. It is for slow links
    between machines: within one, the hooks of 16 bits are faster.

    Raises:
        ValueError: as :func:`dreamcomm.hooks.bf16_feedback`.
    """
    gradient = entered(state, bucket)
    residual = state._residuals.row(bucket)
    rank, world = dist.get_rank(state.group), dist.get_world_size(state.group)
    backend = ours(given_group(state.group), gradient.device)
    parts = Parts(gradient.numel(), world, [] if backend is None else backend.hosts)
    elements = range(gradient.numel())
    sender = _Sender(residual)
    source: _Source = partial(_taken, residual, gradient)
    for stage in parts.stages(rank):
        received = _exchanged(state.group, stage, elements, sender, source)
        elements = stage.part(elements, stage.ranks.index(rank))
        source = partial(received.add_up, elements)
    mine = Rows(1, parts.blocks, gradient.device)
    sender.put(source, mine, 0, elements, divisor=world, dtype=gradient.dtype)
    return _gathered(state, gradient, parts, mine, inspected_lengths(state, bucket))


def _taken(residual: Tensor, gradient: Tensor, piece: range, out: Tensor, _: Tensor) -> None:
    """The residual, which is zero then, and the gradient."""
    flat, place = out.view(-1), slice(piece.start, piece.stop)
    torch.add(residual[place], gradient[place], out=flat[: len(piece)])
    flat[len(piece) :].zero_()
    residual[place].zero_()


class _Sender:
    """Puts parts of a bucket into bytes, and adds to its residual what gets lost."""

    def __init__(self, residual: Tensor) -> None:
        self.device = device = residual.device
        blocks = min(blocks_in(range(residual.numel())), slice_of(device))
        self._residual = residual
        self._exact, self._scratch = torch.empty(
            (2, blocks, BLOCK), dtype=torch.float32, device=device
        )

    def put(
        self,
        source: _Source,
        rows: Rows,
        row: int,
        part: range,
        divisor: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Puts a part, divided, into a row.

        Args:
            dtype: what the receivers round to once more.
        """
        for piece in slices(part, self.device):
            count = blocks_in(piece)
            exact, scratch = self._exact[:count], self._scratch[:count]
            source(piece, exact, scratch)
            if divisor > 1:
                exact.div_(divisor)
            compress(exact, *rows.views(row, part, piece), scratch, dtype)
            lost = exact.view(-1)[: len(piece)]
            self._residual[piece.start : piece.stop].add_(lost, alpha=float(divisor))


def _exchanged(
    group: dist.ProcessGroup | None,
    stage: Stage,
    elements: range,
    sender: _Sender,
    source: _Source,
) -> Rows:
    """Sends each rank of the stage its part; returns this rank's part of each of them."""
    count, device = len(stage.ranks), sender.device
    sent, received = Rows(count, stage.blocks, device), Rows(count, stage.blocks, device)
    for row in range(count):
        sender.put(source, sent, row, stage.part(elements, row))
    if count == 1:
        return sent
    splits = [int(rank in stage.ranks) for rank in range(dist.get_world_size(group))]
    dist.all_to_all_single(received.bytes, sent.bytes, splits, splits, group=group)
    return received


def _gathered(
    state: State, gradient: Tensor, parts: Parts, mine: Rows, lengths: list[int]
) -> Future[Tensor]:
    """Sends this rank's part to all; the future has the averages."""
    world = dist.get_world_size(state.group)
    all_parts = Rows(world, parts.blocks, gradient.device)
    results, number = state._pass.results, state._pass.latest

    def receive(done: "Future[list[Tensor]]") -> Tensor:
        done.value()  # raises what the collective raised
        if gradient.is_cuda:
            # Their memory may be used again only after this stream, which is one of torch's.
            for used in (mine.bytes, all_parts.bytes):
                used.record_stream(torch.cuda.current_stream(gradient.device))
        for rank in range(world):
            all_parts.write(rank, parts.averaged_by(rank), gradient)
        if lengths:
            results[number] = unpack_inspected(gradient, gradient, lengths)
        return gradient

    rows = list(all_parts.bytes.unbind())
    work = dist.all_gather(rows, mine.bytes[0], group=state.group, async_op=True)
    assert work is not None  # as it is asynchronous
    if gradient.is_cuda and not captures(gradient.device):
        state._pass.work = work
    future: Future[Tensor] = work.get_future().then(receive)
    return future
