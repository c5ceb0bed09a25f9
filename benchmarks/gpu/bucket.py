"""Times dreamcomm.ops.pack and unpack on a GPU beside torch's own ways, interleaved.

    python benchmarks/gpu/bucket.py OUT.jsonl

One line for each list of parameters and pass: the median seconds of a pass by each way, the bytes
that it must move (float32 through bfloat16: 6 an element), their share of the device-to-device
copy rate measured in the same run, and how many times faster dreamcomm is than torch's best. Times
are of one device, by CUDA events; nothing in them is the bandwidth of a link.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from dreamcomm import ops

ROUNDS = 20
CALLS = 5  # in a row, between two events
BUCKET = 25 << 20  # bytes of float32
FLUSH = 512 << 20  # bytes written between rounds: no way finds its tensors in the L2 cache

Way = Callable[[], object]


def transformer_layer() -> list[int]:
    """Parameters of one layer of a 7 B model: hidden 4096, intermediate 11008, gated."""
    hidden, wide = 4096, 11008
    return [hidden * hidden] * 4 + [hidden * wide] * 3 + [hidden] * 2


def resnet50() -> list[int]:
    sizes = [64 * 3 * 49, 64, 64]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            out = 4 * width
            for weight, features in (
                (channels * width, width),
                (width * width * 9, width),
                (width * out, out),
            ):
                sizes += [weight, features, features]
            if block == 0:
                sizes += [channels * out, out, out]
            channels = out
    return [*sizes, 2048 * 1000, 1000]


def buckets(sizes: list[int]) -> list[list[int]]:
    """As DDP makes them: filled up to 25 MiB."""
    found: list[list[int]] = [[]]
    for size in sizes:
        if found[-1] and 4 * (sum(found[-1]) + size) > BUCKET:
            found.append([])
        found[-1].append(size)
    return found


def timed(ways: dict[str, Way]) -> dict[str, float]:
    """Median seconds of a call of each, in turns."""
    scratch = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for round_number in range(ROUNDS):
        for name, way in ways.items():
            scratch.fill_(round_number % 256)
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(CALLS):
                way()
            end.record()
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end) / 1e3 / CALLS)
    return {name: median(found) for name, found in seconds.items()}


def copy_rate() -> float:
    """Bytes read and written a second, device to device, far beyond the L2 cache."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found = timed({"copy": lambda: target.copy_(source)})
    return 2 * source.numel() / found["copy"]


def pack_ways(tensors: list[Tensor], flat: Tensor) -> dict[str, Way]:
    views = list(torch.split(flat, [t.numel() for t in tensors]))

    def foreach() -> None:
        torch._foreach_copy_(views, tensors)
        flat.mul_(0.5)

    def flatten() -> Tensor:
        one: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        return one.to(torch.bfloat16).mul_(0.5)

    return {
        "dreamcomm": lambda: ops.pack(tensors, flat, scale=0.5),
        "_foreach_copy_, mul_": foreach,
        "_flatten_dense_tensors, to, mul_": flatten,
    }


def unpack_ways(tensors: list[Tensor], flat: Tensor) -> dict[str, Way]:
    views = list(torch.split(flat, [t.numel() for t in tensors]))

    def foreach() -> None:
        torch._foreach_copy_(tensors, views)
        torch._foreach_mul_(tensors, 0.5)

    def norm() -> Tensor:
        foreach()
        return torch.nn.utils.get_total_norm(tensors)

    return {
        "dreamcomm": lambda: ops.unpack(flat, tensors, divisor=2),
        "_foreach_copy_, _foreach_mul_": foreach,
        "dreamcomm, norm": lambda: ops.unpack(flat, tensors, divisor=2, inspect=True),
        "the same, get_total_norm": norm,
    }


def measure(name: str, sizes: list[int], rate: float) -> list[dict[str, object]]:
    tensors = [torch.randn(size, device="cuda") for size in sizes]
    flat = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cuda")
    moved = 6 * flat.numel()
    rows: list[dict[str, object]] = []
    for what, ways in (("pack", pack_ways(tensors, flat)), ("unpack", unpack_ways(tensors, flat))):
        seconds = timed(ways)
        best = min(s for way, s in seconds.items() if "dreamcomm" not in way and "norm" not in way)
        rows.append(
            {
                "parameters": name,
                "tensors": len(sizes),
                "elements": flat.numel(),
                "pass": what,
                "bytes": moved,
                "seconds": seconds,
                "of_copy_rate": moved / seconds["dreamcomm"] / rate,
                "times_torch": best / seconds["dreamcomm"],
            }
        )
    return rows


def main() -> None:
    rate = copy_rate()
    lists = {"7 B layer": transformer_layer(), "ResNet-50": resnet50(), "tiny": [100] * 10_000}
    lines: list[dict[str, object]] = [
        {"device": torch.cuda.get_device_name(0), "copy_bytes_per_s": rate}
    ]
    for name, sizes in lists.items():
        lines += measure(f"{name}, whole", sizes, rate)
        lines += measure(f"{name}, first bucket of 25 MiB", buckets(sizes)[0], rate)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    Path(sys.argv[1]).write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
