"""Times all_reduce of processes on GPUs beside torch's symmetric memory, interleaved.

    python benchmarks/gpu/collectives.py OUT.jsonl [SECONDS]

Two lines for each world, dtype and size, of calls that Python makes and of calls that a graph has
captured, which take the host no time: the median seconds of a call by each way, and how many times
faster dreamcomm is on registered memory than the faster of torch's one-shot and two-shot, whose
memory is registered, too. With one GPU all ranks share it, with the multi-process service if
that can be started: the figures compare ways under the same conditions, and say nothing of links.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lines import ONE_GPU, Line, require_gpu, write_lines
from mps import multi_process_service

import dreamcomm

ROUNDS = range(3, 16)  # fewest and most
CALLS = 10  # in a row, between two events
BY_PYTHON, BY_A_GRAPH = "by Python", "by a graph"
KIB = 1 << 10
SIZES = [4 * KIB, 64 * KIB, 1 << 20, 8 << 20, 64 << 20]
DTYPES = (torch.float32, torch.bfloat16)
WORLDS = (2, 4)
OURS, PLAIN, THEIRS = "dreamcomm registered", "dreamcomm", "symm_mem"

Way = Callable[[], object]


class Case:
    """The tensors of one size. They are zeros, so that repeated sums do not change them."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        count = size // dtype.itemsize
        self.plain = plain = torch.zeros(count, dtype=dtype, device=device)
        self.registered = registered = dreamcomm.empty(count, dtype=dtype, device=device).zero_()
        assert dreamcomm.is_shared(registered)
        self.tensors = [plain, registered]
        self.ways: dict[str, Way] = {
            PLAIN: lambda: dist.all_reduce(plain),
            OURS: lambda: dist.all_reduce(registered),
        }
        theirs, self.why_not = symmetric_zeros(count, dtype, device)
        if self.why_not is None:
            group = dist.group.WORLD
            assert theirs is not None
            assert group is not None
            ops, name = torch.ops.symm_mem, group.group_name
            self.tensors.append(theirs)
            self.ways |= {
                f"{THEIRS} one_shot": lambda: ops.one_shot_all_reduce(theirs, "sum", name),
                f"{THEIRS} two_shot": lambda: ops.two_shot_all_reduce_(theirs, "sum", name),
            }

    def is_right(self) -> bool:
        """Checks that all ways add up the ranks' inputs."""
        rank, world = dist.get_rank(), dist.get_world_size()
        found = []
        for name, way in self.ways.items():
            for tensor in self.tensors:
                tensor.fill_(rank + 1)
            torch.cuda.synchronize()
            dist.barrier()
            given = way()
            result = {PLAIN: self.plain, OURS: self.registered}.get(name, given)
            assert isinstance(result, torch.Tensor)
            found.append(bool((result == world * (world + 1) / 2).all()))
            dist.barrier()
        for tensor in self.tensors:
            tensor.zero_()
        return all(found)


def symmetric_zeros(
    count: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor | None, str | None]:
    """A tensor in torch's symmetric memory; or, on all ranks, why some rank has none."""
    import torch.distributed._symmetric_memory as symmetric

    made = why_not = None
    try:
        assert dist.group.WORLD is not None
        made = symmetric.empty(count, dtype=dtype, device=device).zero_()
        symmetric.rendezvous(made, dist.group.WORLD)
    except RuntimeError as error:
        why_not = str(error).splitlines()[0]
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why_not)
    return made, next((reason for reason in reasons if reason is not None), None)


def row_of(way: Way) -> Way:
    def calls() -> None:
        for _ in range(CALLS):
            way()

    return calls


def graph_of(way: Way) -> Way:
    """Captures calls. Make some of the same kind before: a group's first one bootstraps it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row_of(way)()
    return graph.replay


def seconds_of(calls: Way) -> float:
    """Seconds of one of the calls, by the stream of the slowest rank."""
    dist.barrier()
    torch.cuda.synchronize()
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    calls()
    end.record()
    torch.cuda.synchronize()
    seconds = torch.tensor([float(begin.elapsed_time(end)) / 1e3 / CALLS])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def is_over(until: float) -> bool:
    """Whether the time is over; the same on all ranks."""
    over = torch.tensor([time.monotonic() > until])
    dist.broadcast(over, 0)
    return bool(over)


def time_case(case: Case, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of each way, from Python and from a graph."""
    rows = {(BY_PYTHON, name): row_of(way) for name, way in case.ways.items()}
    rows |= {(BY_A_GRAPH, name): graph_of(way) for name, way in case.ways.items()}
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in rows}
    until = time.monotonic() + seconds
    for turn in range(1 + ROUNDS.stop):
        for key, calls in rows.items():
            found = seconds_of(calls)
            if turn > 0:  # the first round warms up
                taken[key].append(found)
        if turn >= ROUNDS.start and is_over(until):
            break
    middle: dict[str, dict[str, float]] = {BY_PYTHON: {}, BY_A_GRAPH: {}}
    for (made, name), found_in in taken.items():
        middle[made][name] = median(found_in)
    return middle


def run(seconds: float) -> list[Line]:
    """Runs in every rank; `seconds` is the limit for all cases."""
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    until = time.monotonic() + seconds
    cases = [(dtype, size) for dtype in DTYPES for size in SIZES]
    lines: list[Line] = []
    for index, (dtype, size) in enumerate(cases):
        if is_over(until):
            break
        case = Case(size, dtype, device)
        right = case.is_right()
        share = (until - time.monotonic()) / (len(cases) - index)
        described = {
            "figure": "collective",
            "call": "all_reduce",
            "ranks": dist.get_world_size(),
            "dtype": str(dtype).removeprefix("torch."),
            "bytes": size,
            "verified": right,
        }
        for made, found in time_case(case, max(share, 0.0)).items():
            lines.append(described | {"made": made} | compared(found, case.why_not))
    return lines


def compared(found: dict[str, float], why_not: str | None) -> Line:
    """The seconds of each way, and ours beside the best of the others."""
    peers = [(seconds, way) for way, seconds in found.items() if way.startswith(THEIRS)]
    best = min(peers, default=(None, f"{THEIRS} could not be used: {why_not}"))
    return {
        "seconds": found,
        "best_peer": best[1],
        "ratio": best[0] and best[0] / found[OURS],
        "ratio_plain": best[0] and best[0] / found[PLAIN],
        "goal": 1.0,
        "median_goal": 1.2,
    }


def main(out: Path, seconds: float) -> int:
    require_gpu()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the service is stopped then, too
    # Before the ranks start. Multicast is for several devices: with one it may wait for ever.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    # With more than two clients of the service, CUDA has no memory for 32 queues of each.
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    options = dreamcomm.Options(cuda="dreamcomm", cuda_heap_bytes=256 << 20, costs="fixed")
    lines: list[Line] = []
    alone = torch.cuda.device_count() == 1
    with tempfile.TemporaryDirectory() as folder, multi_process_service(Path(folder)) as sharing:
        for world in WORLDS:
            found = dreamcomm.spawn(
                run,
                world,
                args=(seconds / len(WORLDS),),
                options=options,
                timeout=60,
                start_method="spawn",
            )
            right = [all(line["verified"] for line in at) for at in zip(*found, strict=True)]
            lines += [
                line | {"verified": ok, "sharing": sharing}
                for line, ok in zip(found[0], right, strict=True)
            ]
            label = ONE_GPU if alone else f"{torch.cuda.device_count()} GPUs"
            write_lines(out, lines, f"{label}; {sharing}")
    return 0 if all(line["verified"] for line in lines) else 1


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    raise SystemExit(main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) == 3 else 60.0))
