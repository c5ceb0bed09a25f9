"""Groups on several hosts, beside torch's Gloo over all ranks: all_reduce on shaped links.

    python benchmarks/between_hosts.py
    python benchmarks/between_hosts.py --only "2 x 2, 1 Gbit/s" --json between.json

Hosts are network namespaces of this machine. The kernel shapes their links (tbf), and a relay in
user space delays them, because the available kernels have no netem. Needs root. All ranks share
this machine's processors. Both groups take turns in one run, buffers are rewritten before each
burst of calls, the results are checked, and the time of a call is that of its slowest rank. A
burst begins with a small call that is not counted: after a barrier of another group the ranks,
several of which share a processor, begin milliseconds apart. The wire's share is the time of the
bytes that must leave a host at the link's rate, over the measured time.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer

from dreamcomm.tools.bench.measurement import Json, Measurement, chosen
from dreamcomm.tools.bench.report import format_time
from dreamcomm.tools.bench.sizes import format_size
from dreamcomm.tools.bench.turns import slowest_here, take_turns
from dreamcomm.tools.simulate.cluster import Cluster, Wire
from dreamcomm.tools.simulate.predict import collective

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from internode.network import Network, NoNetwork, enter  # found by the line above

SIZES = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20]
SECONDS = 1.5  # for both backends at one size, about
LEAST_TURNS, MOST_TURNS = 4, 60
BURST, MOST_BURST = 4 << 20, 100  # bytes and calls of a burst
GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Setting:
    """ranks: on each host. gigabits: a host's link. delay: seconds on the wire, or 0."""

    ranks: tuple[int, ...]
    gigabits: int
    delay: float = 0.0

    @property
    def name(self) -> str:
        hosts, each = len(self.ranks), set(self.ranks)
        shape = f"{hosts} x {min(each)}" if len(each) == 1 else " + ".join(map(str, self.ranks))
        delay = f", {self.delay * 1e6:.0f} us" if self.delay else ""
        return f"{shape}, {self.gigabits} Gbit/s{delay}"


SETTINGS = [
    Setting((2, 2), 1),
    Setting((2, 2), 10),
    Setting((2, 2), 1, 50e-6),
    Setting((2, 2), 1, 1e-3),
    Setting((2, 2), 10, 50e-6),
    Setting((2, 2), 10, 1e-3),
    Setting((4, 4), 1),
    Setting((1, 1, 1, 2), 1),
    Setting((1, 1, 1, 1), 1),
    Setting((1, 1), 1),
    Setting((1, 1), 10),
]


def timed(tensors: list[torch.Tensor], group: dist.ProcessGroup, quiet: dist.ProcessGroup) -> float:
    """Seconds of one call of a burst on tensors of their own, checked; of this rank."""
    for tensor in tensors:
        tensor.fill_(float(dist.get_rank() + 1))
    dist.barrier(group=quiet)
    dist.all_reduce(torch.zeros(1), group=group)
    begin = perf_counter()
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    seconds = perf_counter() - begin
    size = dist.get_world_size()
    if not all(bool((tensor == size * (size + 1) / 2).all()) for tensor in tensors):
        raise AssertionError(f"a wrong sum of {tensors[0].numel()} elements")
    return seconds / len(tensors)


def measure(sizes: list[int]) -> dict[str, Any]:
    """Both backends in turns, and what dreamcomm has measured of the links."""
    gloo = dist.new_group(backend="gloo")
    ours = dist.group.WORLD
    assert ours is not None
    rows = []
    for nbytes in sizes:
        tensors = [
            torch.empty(nbytes // 4) for _ in range(min(max(BURST // nbytes, 1), MOST_BURST))
        ]
        first = torch.tensor([timed(tensors, ours, gloo) + timed(tensors, gloo, gloo)])
        dist.all_reduce(first, op=dist.ReduceOp.MAX, group=gloo)
        turns = int(SECONDS / first.item() / len(tensors))
        turns = min(max(turns, LEAST_TURNS), MOST_TURNS)
        groups = {"dreamcomm": ours, "gloo": gloo}
        found = take_turns({n: partial(timed, tensors, g, gloo) for n, g in groups.items()}, turns)
        medians = {name: median(slowest_here(times, gloo)) for name, times in found.items()}
        rows.append({"bytes": nbytes, "turns": turns, **medians})
    backend: Any = ours._get_backend(torch.device("cpu"))
    return {"rows": rows, "costs": backend._level_costs}


def run_rank(
    rank: int, setting: Setting, hosts: list[str], store: str, run: Callable[..., Any], args: Any
) -> None:
    """One rank; rank 0 writes what it has found into a file."""
    host = next(h for h in range(len(hosts)) if rank < sum(setting.ranks[: h + 1]))
    enter(hosts[host])
    torch.set_num_threads(1)
    size = sum(setting.ranks)
    dist.init_process_group(
        "dreamcomm",
        store=dist.FileStore(store, size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    found = run(*args)
    if rank == 0:
        torch.save(found, f"{store}.found")
    dist.barrier()
    dist.destroy_process_group()


def run_between_hosts(setting: Setting, control: str, run: Callable[..., Any], *args: Any) -> Any:
    """What ``run`` returns on rank 0 of a group of ranks on hosts of their own."""
    shape = f"{setting.gigabits}gbit", setting.delay
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network(len(setting.ranks), *shape, congestion=control))
        except NoNetwork as why:
            raise SystemExit(str(why)) from None
        store = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store")
        start: Any = mp.spawn  # type: ignore[attr-defined]
        start(run_rank, (setting, network.hosts, store, run, args), nprocs=sum(setting.ranks))
        return torch.load(f"{store}.found")


def congestion() -> str:
    """TCP's congestion control on the links: the usual one, or the closest that is allowed here.

    Some machines have one that paces its data (bbr), which stalls calls of short bursts.
    """
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    return "cubic" if "cubic" in allowed else "reno"


def wire_seconds(setting: Setting, nbytes: int) -> float:
    """The time of the bytes of an all_reduce that leave a host, at its link's rate."""
    hosts = len(setting.ranks)
    return 2 * (hosts - 1) / hosts * nbytes / (setting.gigabits * GIGABIT)


def measured(setting: Setting, sizes: list[int], control: str) -> dict[str, Any]:
    found = run_between_hosts(setting, control, measure, sizes)
    here, numbers = found["costs"]
    wire = Wire.of(numbers)
    cluster = Cluster(setting.ranks, here, wire)
    rows = found["rows"]
    for row in rows:
        forecast = collective("all_reduce", row["bytes"], cluster)
        row["speedup"] = row["gloo"] / row["dreamcomm"]
        row["wire_share"] = wire_seconds(setting, row["bytes"]) / row["dreamcomm"]
        row["predicted"] = forecast.seconds
        row["way"] = forecast.way
        row["error"] = forecast.seconds / row["dreamcomm"] - 1
    return {
        "setting": setting.name,
        "wire": asdict(wire),
        "rows": rows,
    }


def cells(row: dict[str, Any]) -> list[str]:
    return [
        format_size(row["bytes"]),
        format_time(row["dreamcomm"]),
        format_time(row["gloo"]),
        f"{row['speedup']:.2f}",
        f"{row['wire_share']:.2f}",
        format_time(row["predicted"]),
        f"{row['error']:+.0%}",
        row["way"].split(",")[0],
    ]


Only = Annotated[
    list[str] | None, typer.Option(help="A setting's name; repeatable.", show_default="all")
]


def in_settings(settings: list[Setting], only: list[str] | None) -> list[Setting]:
    """Those that were named, or all."""
    names = chosen(only, (one.name for one in settings), "--only")
    return [one for one in settings if one.name in names]


def main(
    only: Only = None,
    most: Annotated[int, typer.Option(help="The largest size in bytes.")] = SIZES[-1],
    json: Json = None,
    control: Annotated[
        str | None, typer.Option(help="TCP's congestion control.", show_default="cubic, or reno")
    ] = None,
) -> None:
    """Times all_reduce between hosts that are network namespaces; see the head of this file."""
    control = control or congestion()
    measurement = Measurement(json, congestion=control)
    results = []
    for setting in in_settings(SETTINGS, only):
        found = measured(setting, [size for size in SIZES if size <= most], control)
        results.append(found)
        wire = found["wire"]
        measurement.table(
            f"{found['setting']}: measured {wire['latency'] * 1e6:.0f} us, "
            f"{wire['bandwidth'] / 1e6:.0f} MB/s a host",
            ("size", "dreamcomm", "gloo", "x gloo", "wire's share", "predicted", "error", "by"),
            map(cells, found["rows"]),
            names=0,
        )
    measurement.write(settings=results)


if __name__ == "__main__":
    typer.run(main)
