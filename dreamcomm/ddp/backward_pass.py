"""The buckets of a backward pass of DistributedDataParallel, and the results of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dreamcomm.buckets.norm import powers
from dreamcomm.buckets.ops import unpack

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket


@dataclass(frozen=True)
class Inspected:
    """What was found in a bucket's averages.

    Attributes:
        squares: what the 2-norm is made of, float64: on the CPU the sums of the squares of blocks
            (:mod:`dreamcomm.buckets.norm`), on a CUDA device one sum of all.
        finite: whether no element is infinite or NaN; on a CUDA device a tensor.
    """

    squares: Tensor
    finite: bool | Tensor


def unpack_inspected(
    buffer: Tensor, gradient: Tensor, lengths: Sequence[int], *, divisor: int = 1
) -> Inspected:
    """As :func:`dreamcomm.buckets.ops.unpack` into a bucket of gradients of these lengths."""
    if gradient.device.type != "cpu":
        result = unpack(buffer, [gradient], divisor=divisor, inspect=True)
        assert isinstance(result.squared_norm, torch.Tensor)
        assert result.finite is not None
        return Inspected(result.squared_norm, result.finite)
    unpack(buffer, [gradient], divisor=divisor)
    squares = powers(torch.split(gradient.view(-1), list(lengths)), 2.0)
    # Squares of large finite numbers of 64 bits overflow; of narrower types they do not.
    finite = math.isfinite(float(squares.sum())) or bool(torch.isfinite(gradient).all())
    return Inspected(squares, finite)


class Pass:
    """The latest pass that communicated, even if it has not ended.

    A bucket of index k is the k-th of its pass. In the first pass of a static graph with several
    buckets, however, torch gives each the index 0 and marks none as the last. In such a pass a
    bucket belongs to the same pass if its parameters have not been seen in it.
    """

    def __init__(self) -> None:
        self.results: dict[int, Inspected] = {}  # by the number that enter() gave the bucket
        self.work: dist.Work | None = None  # the latest call on a device
        self._first = self._entered = 0  # numbers of this pass: from _first to _entered - 1
        self._ended = False
        self._nameless = False  # all of its buckets have the index 0, and none is the last one
        self._seen: set[int] = set()  # their parameters

    def enter(self, bucket: GradBucket) -> bool:
        """Gives the bucket the number ``latest``; True if a pass begins with it."""
        begins = bucket.index() == 0 and not self._continues(bucket)
        if begins:
            self.results, self.work = {}, None  # calls under way keep those of their pass
            self._first, self._seen = self._entered, set()
            self._nameless = not bucket.is_last()
        self._nameless &= bucket.index() == 0
        if self._nameless:
            self._seen.update(map(id, bucket.parameters()))
        self._entered += 1
        self._ended = bucket.is_last() or (self._nameless and not begins)
        return begins

    @property
    def latest(self) -> int:
        return self._entered - 1

    def found(self) -> list[Inspected]:
        """The results of all buckets, in order.

        Raises:
            RuntimeError: the pass has not ended, or nothing was collected in it.
        """
        numbers = range(self._first, self._entered)
        found = [self.results[number] for number in numbers if number in self.results]
        if not found or len(found) < len(numbers) or not self._ended:
            raise RuntimeError(
                "no norm was collected: call this after a backward pass that communicated, with "
                "the hook dreamcomm.hooks.average or with State(norm=True)"
                + (f"; the latest pass ended after {len(found)} buckets" if found else "")
            )
        return found

    def _continues(self, bucket: GradBucket) -> bool:
        return self._nameless and self._seen.isdisjoint(map(id, bucket.parameters()))
