"""Which gradients are reduced together: a pure function of sizes, dtypes and an order.

A bucket holds gradients of one dtype on one device, in the order in which a backward pass makes
them. Its collective starts when its last gradient is there, so a bucket near the end of the model
is on its way while the rest of the pass still runs::

    backward:   head | block 3 | block 2 | block 1 | embedding
    buckets:   [ 0  ][        1        ][        2          ]
                     ^ started          ^ started           ^ started

The first bucket is small, so that communication begins early (PyTorch Distributed, Li et al. 2020,
section 3.2.3). Gradients that no rank's first pass has made come last: their bucket is complete
only at the end of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["BucketPlan", "ParameterInfo", "Plan", "agreed_order", "plan_buckets"]

MIB = 1 << 20
Kind = tuple[torch.dtype, torch.device, bool, float]  # what a bucket's gradients share


@dataclass(frozen=True)
class ParameterInfo:
    """What the plan needs of a parameter.

    Attributes:
        name: its name in the module, with dots.
        numel: number of elements.
        dtype, device: of its gradient.
        sparse: whether its gradient is a sparse tensor.
        factor: of the ranks' sum; a bucket has parameters of one factor alone. 0: the engine's.
    """

    name: str
    numel: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    factor: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """The members of a bucket, as numbers of parameters, in the order of their gradients."""

    members: tuple[int, ...]
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False


@dataclass(frozen=True)
class Plan:
    """Buckets in the order in which their collectives start. ``str(plan)`` is a table."""

    parameters: tuple[ParameterInfo, ...]
    buckets: tuple[BucketPlan, ...]

    def members(self) -> list[list[int]]:
        return [list(bucket.members) for bucket in self.buckets]

    def __str__(self) -> str:
        rows = ["bucket  gradients      bytes  dtype     device  from ... to"]
        for number, bucket in enumerate(self.buckets):
            first = self.parameters[bucket.members[0]].name
            last = self.parameters[bucket.members[-1]].name
            names = first if len(bucket.members) == 1 else f"{first} ... {last}"
            dtype = str(bucket.dtype).removeprefix("torch.") + (
                " (sparse)" if bucket.sparse else ""
            )
            rows.append(
                f"{number:6d}  {len(bucket.members):9d}  {bucket.nbytes:9,d}  {dtype:8s}  "
                f"{bucket.device!s:6s}  {names}"
            )
        return "\n".join(rows)


def plan_buckets(
    parameters: Sequence[ParameterInfo],
    *,
    order: Sequence[int] | None = None,
    unseen: Sequence[int] = (),
    cap_bytes: int = 25 * MIB,
    first_bytes: int = MIB,
    caps: Sequence[int] = (),
) -> Plan:
    """Puts parameters into buckets.

    Args:
        parameters: in the order of the module.
        order: all numbers of parameters in the order in which their gradients are made; None is the
            reverse of the module's order.
        unseen: numbers of parameters whose gradients no rank has made so far; they come last, in
            buckets of their own.
        cap_bytes: a bucket is closed when it has so many bytes.
        first_bytes: the same for the first bucket.
        caps: the same for each of the first buckets; takes the place of ``first_bytes``.

    Raises:
        ValueError: ``order`` does not name each parameter once, or a cap is below 1.
    """
    numbers = list(range(len(parameters)))[::-1] if order is None else list(order)
    if sorted(numbers) != list(range(len(parameters))):
        raise ValueError(
            f"plan_buckets: expected 'order' to name each of {len(parameters)} parameters once, "
            f"got {numbers}"
        )
    limits = list(caps) or [first_bytes]
    if min([cap_bytes, *limits]) < 1:
        raise ValueError(
            f"plan_buckets: expected caps of at least 1 byte, got {cap_bytes} and {limits}"
        )
    late = set(unseen)
    numbers.sort(key=lambda number: number in late)  # keeps the order otherwise
    closed: list[tuple[int, BucketPlan]] = []  # with the place of its last gradient
    open_: dict[Kind, list[int]] = {}
    sizes: dict[Kind, int] = {}

    def close(members: list[int], place: int) -> None:
        nbytes = sum(parameters[member].nbytes for member in members)
        first = parameters[members[0]]
        bucket = BucketPlan(tuple(members), nbytes, first.dtype, first.device, first.sparse)
        closed.append((place, bucket))

    for place, number in enumerate(numbers):
        info = parameters[number]
        if info.sparse:
            close([number], place)
            continue
        kind = info.dtype, info.device, number in late, info.factor
        open_.setdefault(kind, []).append(number)
        sizes[kind] = sizes.get(kind, 0) + info.nbytes
        if sizes[kind] >= (limits[len(closed)] if len(closed) < len(limits) else cap_bytes):
            close(open_.pop(kind), place)
            del sizes[kind]
    for members in open_.values():
        close(members, numbers.index(members[-1]))
    closed.sort(key=lambda pair: pair[0])
    return Plan(tuple(parameters), tuple(bucket for _, bucket in closed))


def agreed_order(orders: Sequence[Sequence[int]], count: int) -> tuple[list[int], list[int]]:
    """One order of gradients for all ranks, of those that the ranks have seen.

    The first rank's order leads; gradients that only others have seen follow in theirs.

    Args:
        orders: for each rank the numbers of the gradients that its first pass has made.
        count: the number of parameters.

    Returns:
        All numbers in order, and those that no rank has seen, which come last in it.
    """
    order: dict[int, None] = {}
    for seen in orders:
        order.update(dict.fromkeys(seen))
    unseen = [number for number in reversed(range(count)) if number not in order]
    return [*order, *unseen], unseen
