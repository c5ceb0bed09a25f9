"""The passes over a bucket alone, in one process: dreamcomm's, and torch's operations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.nn.utils import get_total_norm

import dreamcomm
from dreamcomm.tools.bench.measurement import Measurement
from dreamcomm.tools.bench.turns import take_turns

# A bucket of DDP's usual 25 MiB, and a small one that stays in the cache.
SIZES = {"25 MiB": 25 << 18, "1 MiB": 1 << 18}
TENSORS = 16
ROUNDS = 40
WORLD = 2


@dataclass(frozen=True)
class Pass:
    """One way to do one thing: seconds, p50, and the bytes per element that it must move."""

    task: str
    way: str
    size: str
    seconds: float
    bytes_per_element: int


class Bucket:
    """float32 gradients, their bfloat16 buffer, and the same by torch's means."""

    def __init__(self, numel: int) -> None:
        self.tensors = [torch.randn(numel // TENSORS) for _ in range(TENSORS)]
        self.wire = torch.empty(numel, dtype=torch.bfloat16)
        self.views = list(torch.split(self.wire, numel // TENSORS))
        self.residual = torch.zeros(numel)

    def feedback_by_torch(self) -> None:
        value = flatten(self.tensors).mul_(1 / WORLD).add_(self.residual)
        self.wire.copy_(value)
        torch.sub(value, self.wire, out=self.residual)

    def pack_by_foreach(self) -> None:
        torch._foreach_copy_(self.views, self.tensors)
        self.wire.mul_(1 / WORLD)

    def unpack_by_foreach(self) -> None:
        torch._foreach_copy_(self.tensors, self.views)
        torch._foreach_div_(self.tensors, WORLD)

    def unpack_with_norm_by_foreach(self) -> None:
        self.unpack_by_foreach()
        get_total_norm(self.tensors).isfinite().item()


def flatten(tensors: list[Tensor]) -> Tensor:
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def ways_of(bucket: Bucket) -> dict[tuple[str, str], tuple[Callable[[], object], int]]:
    """For each task and way: the function to call, and the bytes that an element needs."""
    ops, tensors, wire = dreamcomm.ops, bucket.tensors, bucket.wire
    scale = 1 / WORLD
    return {
        ("pack", "ops.pack"): (lambda: ops.pack(tensors, wire, scale=scale), 6),
        ("pack", "_foreach_copy_, mul_"): (bucket.pack_by_foreach, 10),
        ("pack", "_flatten_dense_tensors, to, mul_"): (
            lambda: flatten(tensors).to(wire.dtype).mul_(scale),
            18,
        ),
        ("pack, feedback", "ops.pack"): (
            lambda: ops.pack(tensors, wire, scale=scale, residual=bucket.residual),
            14,
        ),
        ("pack, feedback", "torch"): (bucket.feedback_by_torch, 44),
        ("unpack", "ops.unpack"): (lambda: ops.unpack(wire, tensors, divisor=WORLD), 6),
        ("unpack", "_foreach_copy_, _foreach_div_"): (bucket.unpack_by_foreach, 14),
        ("unpack, norm", "ops.unpack"): (
            lambda: ops.unpack(wire, tensors, divisor=WORLD, inspect=True),
            6,
        ),
        ("unpack, norm", "the same, get_total_norm"): (bucket.unpack_with_norm_by_foreach, 18),
    }


def time_passes() -> list[Pass]:
    """All ways take turns; one thread, as a rank has."""
    torch.set_num_threads(1)
    return [one for size, numel in SIZES.items() for one in time_size(size, Bucket(numel))]


def time_size(size: str, bucket: Bucket) -> list[Pass]:
    def seconds_of(call: Callable[[], object]) -> float:
        for tensor in bucket.tensors:
            tensor.fill_(1.0)  # a value that none of the turns drives to 0 or infinity
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    ways = ways_of(bucket)
    turns = {name: partial(seconds_of, call) for name, (call, _) in ways.items()}
    seconds = take_turns(turns, ROUNDS, warm_up=3)
    return [Pass(*name, size, median(seconds[name]), ways[name][1]) for name in ways]


def show_passes(measurement: Measurement, passes: list[Pass]) -> None:
    measurement.table(
        "One bucket, float32 and bfloat16, one thread",
        ("", "", "size", "p50", "bytes per element"),
        (
            (one.task, one.way, one.size, f"{1e3 * one.seconds:.3f} ms", one.bytes_per_element)
            for one in passes
        ),
        names=3,
    )
