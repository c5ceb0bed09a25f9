"""Times all_reduce of two processes on GPUs beside torch's symmetric memory, interleaved.

    python benchmarks/gpu/collectives.py OUT.jsonl

One line for each size: the median seconds of a call by each way. With one GPU both ranks' processes
share it and take turns, by all ways alike: the figures compare ways under the same conditions,
and say nothing of links.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

import dreamcomm

ROUNDS = 15
CALLS = 10  # in a row, between two events
KIB = 1 << 10
SIZES = [4 * KIB, 64 * KIB, 1 << 20, 8 << 20, 64 << 20]

Way = Callable[[], object]


def ways_for(size: int, device: torch.device) -> dict[str, Way]:
    group = dist.group.WORLD
    assert group is not None
    count = size // 4
    plain = torch.ones(count, device=device)
    registered = dreamcomm.empty(count, device=device).fill_(1)
    theirs = symmetric.empty(count, device=device).fill_(1)
    symmetric.rendezvous(theirs, group)
    ops, name = torch.ops.symm_mem, group.group_name
    return {
        # torch's sums grow beyond all numbers in the course of it, which takes no longer.
        "dreamcomm": lambda: dist.all_reduce(plain, dist.ReduceOp.AVG),
        "dreamcomm registered": lambda: dist.all_reduce(registered, dist.ReduceOp.AVG),
        "symm_mem one_shot": lambda: ops.one_shot_all_reduce(theirs, "sum", name),
        "symm_mem two_shot": lambda: ops.two_shot_all_reduce_(theirs, "sum", name),
    }


def seconds_of(way: Way) -> float:
    """Of one call, by this rank's stream."""
    dist.barrier()
    torch.cuda.synchronize()
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        way()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / CALLS


def run() -> list[dict[str, object]]:
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    lines: list[dict[str, object]] = []
    for size in SIZES:
        ways = ways_for(size, device)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(2 + ROUNDS):
            for name, way in ways.items():
                seconds = torch.tensor([seconds_of(way)])
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if turn >= 2:
                    taken[name].append(seconds.item())
        lines.append({"bytes": size, "seconds": {name: median(t) for name, t in taken.items()}})
    return lines


def main() -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    options = dreamcomm.Options(cuda="dreamcomm", cuda_heap_bytes=512 << 20, costs="fixed")
    lines = dreamcomm.spawn(run, 2, options=options, timeout=60)[0]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main()
