"""What the ranks' gradients become: an average, a sum, or an average over what they count."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["AVERAGE", "MOST", "TOKENS", "Averages", "averages_of", "count_of", "given_count"]

TOKENS = "tokens"
MOST = 1 << 62  # below it: a count crosses in 64 bits, two of which say what it is


@dataclass(frozen=True)
class Averages:
    """How gradients are reduced.

    Attributes:
        factor: they are so many times the ranks' sum; 0: divided by ``ranks``, or by counts.
        counted: they are the ranks' sum over the sum of their counts.
        shards: they are sums over so many shards of all ranks, along a tree; 0: over ranks.
    """

    factor: float = 0.0
    counted: bool = False
    shards: int = 0

    def divisor(self, ranks: int) -> float:
        """What the sum is divided by, where it is not counted."""
        return 1.0 / self.factor if self.factor else float(self.shards or ranks)

    def __str__(self) -> str:
        names = {0.0: "mean", 1.0: "sum"}
        reduce = TOKENS if self.counted else names.get(self.factor, self.factor)
        return f"reduce={reduce!r}" + (f", invariant_shards={self.shards}" if self.shards else "")


AVERAGE = Averages()


def averages_of(reduce: object, what: str) -> Averages:
    """The argument ``reduce`` of a way of training.

    Raises:
        ValueError: it is none of those that there are.
    """
    if reduce == "mean":
        return AVERAGE
    if reduce == "sum":
        return Averages(1.0)
    if reduce == TOKENS:
        return Averages(counted=True)
    factor = reduce if isinstance(reduce, (int, float)) and not isinstance(reduce, bool) else 0.0
    if math.isfinite(factor) and factor > 0:
        return Averages(float(factor))
    raise ValueError(
        f"{what}: expected reduce to be 'mean', 'sum', 'tokens' or a factor above 0 for the ranks' "
        f"sum, got {reduce!r}"
    )


def count_of(number: Any, who: str) -> tuple[int, float]:
    """A count as ``BucketSet.count`` takes it: a whole number, and a weight unless it is negative.

    Args:
        number: an int, a float, or a tensor of one element: tokens, samples, or their weights.
        who: for errors.

    Raises:
        TypeError: it is none of these.
        ValueError: it is negative, infinite or NaN, or too large.
    """
    value = number
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError(
                f"{who}: expected a count of one number, got a tensor of shape "
                f"{tuple(value.shape)} and type {value.dtype}; take its sum()"
            )
        value = value.item()
    is_number = hasattr(value, "__index__") or hasattr(value, "__float__")
    if isinstance(value, bool) or not is_number:
        raise TypeError(f"{who}: expected a count of tokens or weights, got {number!r}")
    whole = operator.index(value) if hasattr(value, "__index__") else None
    weight = -1.0 if whole is not None else float(value)
    is_right = math.isfinite(weight) and weight >= 0 if whole is None else 0 <= whole < MOST
    if not is_right:
        raise ValueError(
            f"{who}: expected a count of at least 0, finite and below 2**62, got {number!r}"
        )
    return whole or 0, weight


def given_count(
    averages: Averages, number: Any, what: str, group: dist.ProcessGroup | None
) -> tuple[int, float]:
    """A script's count, as ``BucketSet.count`` takes it; see :func:`count_of`."""
    who = f"{what}.count() on rank {dist.get_rank(group)}"
    if not averages.counted:
        raise RuntimeError(f'{who}: it is for reduce="tokens", got {averages}')
    return count_of(number, who)
