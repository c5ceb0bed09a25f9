"""Times dreamcomm.ops.pack and unpack on a GPU beside torch's own ways, interleaved.

    python benchmarks/gpu/bucket.py OUT.jsonl

One line for each list of parameters, whole and in all of its buckets of 25 MiB, and pass: the
median seconds of a pass by each way, the bytes that it must move (float32 through bfloat16: 6 an
element), their share of the device-to-device copy rate measured in the same run, and how many
times faster dreamcomm is than the best of torch's ways. Before each call other memory is read, far
more than the L2 cache holds: tensors come from the device's memory, and the host has the time to
queue the call. Times are of one device, by CUDA events.

"hook" is what DDP's own bf16 hook does beside its all_reduce, on a bucket that holds the gradients
already (gradient_as_bucket_view): cast, divide, copy back. As it divides before it casts, it is
compared with both passes together only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from lines import Line, require_gpu, write_lines
from lists import buckets, resnet50, tiny, transformer_layer
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from dreamcomm import ops
from dreamcomm.tools.bench.turns import take_turns

ROUNDS = 20
FLUSH = 512 << 20  # bytes read between calls
RATIO, SHARE = 1.3, 0.9  # the goals

Way = Callable[[], object]


@dataclass(frozen=True)
class Bucket:
    """Gradients, the buffer that is sent, and a view of it for each gradient."""

    tensors: list[Tensor]
    flat: Tensor
    views: list[Tensor]


def make_bucket(sizes: list[int]) -> Bucket:
    tensors = [torch.randn(size, device="cuda") for size in sizes]
    flat = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cuda")
    return Bucket(tensors, flat, list(torch.split(flat, sizes)))


def timed(ways: dict[str, Way]) -> dict[str, float]:
    """Median seconds of a call of each way, timed in turns."""
    other = torch.ones(FLUSH // 4, device="cuda")

    def seconds_of(way: Way) -> float:
        # Read, not written: dirty lines of the cache would be written back during the call.
        other.sum()
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        way()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    turns = {name: partial(seconds_of, way) for name, way in ways.items()}
    return {name: median(found) for name, found in take_turns(turns, ROUNDS, warm_up=1).items()}


def copy_rate() -> float:
    """Bytes per second, read and written, of a device copy far larger than the L2 cache."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found = timed({"copy": lambda: target.copy_(source)})
    return 2 * source.numel() / found["copy"]


def for_all(found: list[Bucket], one: Callable[[Bucket], object]) -> Way:
    def run() -> None:
        for bucket in found:
            one(bucket)

    return run


def pack(bucket: Bucket) -> None:
    ops.pack(bucket.tensors, bucket.flat, scale=0.5)


def unpack(bucket: Bucket) -> None:
    ops.unpack(bucket.flat, bucket.tensors, divisor=2)


def unpack_and_norm(bucket: Bucket) -> None:
    ops.unpack(bucket.flat, bucket.tensors, divisor=2, inspect=True)


def foreach_pack(bucket: Bucket) -> None:
    torch._foreach_copy_(bucket.views, bucket.tensors)
    bucket.flat.mul_(0.5)


def foreach_unpack(bucket: Bucket) -> None:
    torch._foreach_copy_(bucket.tensors, bucket.views)
    torch._foreach_mul_(bucket.tensors, 0.5)


def foreach_unpack_and_norm(bucket: Bucket) -> None:
    foreach_unpack(bucket)
    torch.nn.utils.get_total_norm(bucket.tensors)


def flatten(bucket: Bucket) -> None:
    one: Tensor = _flatten_dense_tensors(bucket.tensors)  # type: ignore[no-untyped-call]
    one.to(torch.bfloat16).mul_(0.5)


def both(
    first: Callable[[Bucket], object], second: Callable[[Bucket], object]
) -> Callable[..., None]:
    def one(bucket: Bucket) -> None:
        first(bucket)
        second(bucket)

    return one


def hook_on(found: list[Bucket]) -> Way:
    """Times the passes on its own buckets, each of which is contiguous."""
    wholes = [torch.randn(bucket.flat.numel(), device="cuda") for bucket in found]

    def run() -> None:
        for whole in wholes:
            compressed = whole.to(torch.bfloat16).div_(2)
            whole.copy_(compressed)

    return run


def is_right(bucket: Bucket) -> bool:
    """Checks that both passes give the results of torch's own."""
    expected = torch.cat(bucket.tensors).mul(0.5).to(torch.bfloat16)
    pack(bucket)
    packed = torch.equal(bucket.flat, expected)
    unpack(bucket)
    return packed and torch.equal(torch.cat(bucket.tensors), expected.float() / 2)


def measure(name: str, found: list[Bucket], rate: float, bytes_bound: bool) -> list[Line]:
    right = all(is_right(bucket) for bucket in found)
    elements = sum(bucket.flat.numel() for bucket in found)
    passes: dict[str, tuple[int, dict[str, Way]]] = {
        "pack": (
            6 * elements,
            {
                "dreamcomm": for_all(found, pack),
                "_foreach_copy_, mul_": for_all(found, foreach_pack),
                "_flatten_dense_tensors, to, mul_": for_all(found, flatten),
            },
        ),
        "unpack": (
            6 * elements,
            {
                "dreamcomm": for_all(found, unpack),
                "_foreach_copy_, _foreach_mul_": for_all(found, foreach_unpack),
            },
        ),
        "pack and unpack": (
            12 * elements,
            {
                "dreamcomm": for_all(found, both(pack, unpack)),
                "_foreach_copy_ and mul": for_all(found, both(foreach_pack, foreach_unpack)),
                "hook": hook_on(found),
            },
        ),
        "unpack, norm": (
            6 * elements,
            {
                "dreamcomm": for_all(found, unpack_and_norm),
                "the same, get_total_norm": for_all(found, foreach_unpack_and_norm),
            },
        ),
    }
    lines: list[Line] = []
    for what, (moved, ways) in passes.items():
        seconds = timed(ways)
        best = min((s, way) for way, s in seconds.items() if way != "dreamcomm")
        lines.append(
            {
                "figure": "bucket",
                "parameters": name,
                "tensors": sum(len(bucket.tensors) for bucket in found),
                "buckets": len(found),
                "elements": elements,
                "pass": what,
                "bytes": moved,
                "bytes_bound": bytes_bound,
                "verified": right,
                "seconds": seconds,
                "best_peer": best[1],
                "share": moved / seconds["dreamcomm"] / rate,
                "share_goal": SHARE,
                "ratio": best[0] / seconds["dreamcomm"],
                "ratio_goal": RATIO,
            }
        )
    return lines


def main(out: Path) -> int:
    require_gpu()
    rate = copy_rate()
    lines: list[Line] = [
        {
            "figure": "copy",
            "device": torch.cuda.get_device_name(0),
            "copy_gb_per_s": rate / 1e9,
        }
    ]
    for name, sizes in {"7 B layer": transformer_layer(), "ResNet-50": resnet50()}.items():
        lines += measure(f"{name}, whole", [make_bucket(sizes)], rate, True)
        cut = [make_bucket(bucket) for bucket in buckets(sizes)]
        lines += measure(f"{name}, in buckets of 25 MiB", cut, rate, True)
    # All are in one bucket. There are so few bytes that the launch takes most of the time.
    lines += measure("10,000 tiny tensors", [make_bucket(tiny())], rate, False)
    write_lines(out, lines)
    return 0 if all(line.get("verified", True) for line in lines) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(Path(sys.argv[1])))
