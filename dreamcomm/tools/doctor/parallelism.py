"""A check that measures the ways to train on several cores: threads, DataParallel and ranks.

Two small models are trained for some steps in each way. The ways within this process take turns, so
that other load on the machine slows all of them alike. Ranks are processes of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dreamcomm.tools.doctor.finding import Finding, Severity
from dreamcomm.tools.doctor.ranks import SECONDS, last_words

__all__ = ["describe", "measure", "parallelism"]

# Seconds of a step, by model and way.
Times = dict[str, dict[str, float]]
ONE_THREAD, THREADS, REPLICAS, RANKS = "one thread", "intra-op threads", "DataParallel", "ranks"

MOST = 4  # cores that each way is measured with
ROWS = 8  # of a batch: at least one for each of them
TURNS, RANK_TURNS = 4, 2  # of each way within this process, and of ranks
SETTLE, STEPS = 2, 3  # untimed and timed steps of a turn
LIMIT = 1.5  # seconds after which no other turn starts: on a busy machine threads wait long
BUSY = 0.2  # cores that others use, from which on numbers are doubtful
CLOSE = 1.05  # ways that take up to this multiple of the least time count as equal


def mlp() -> tuple[nn.Module, Tensor]:
    """A model and its batch: gradients of 17 MB against little arithmetic."""
    layers = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
    return layers, torch.randn(ROWS, 1024, device="cpu")


def transformer() -> tuple[nn.Module, Tensor]:
    """A model and its batch: gradients of 4 MB against much arithmetic."""
    layer = nn.TransformerEncoderLayer(192, 4, 768, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(
        ROWS, 32, 192, device="cpu"
    )


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    f"a wide MLP (2 Linear layers, {ROWS} rows)": mlp,
    f"a small transformer (2 layers, {ROWS} rows of 32 tokens)": transformer,
}


def parallelism() -> Finding:
    """The cores and torch's threads, and the fastest way to train two small models on them."""
    cores, threads = usable_cores(), torch.get_num_threads()
    state, meanings = Severity.FINE, []
    if threads > cores:
        state = Severity.NOTE
        meanings.append(
            "torch has more threads than cores, which slows it: set "
            f"OMP_NUM_THREADS={cores} or call torch.set_num_threads({cores})"
        )
    if cores == 1:
        meanings.append("nothing was measured: with one core no parallel way is faster")
    else:
        try:
            meanings += report(min(cores, MOST))
        except Exception as error:
            state = Severity.NOTE
            meanings.append(f"the ways to train on several cores were not measured: {why(error)}")
    found = f"{counted(cores, 'core')}, torch uses {counted(threads, 'thread')}"
    return Finding("parallelism", state, found, "; ".join(meanings))


def usable_cores() -> int:
    """The cores that this process may use, by its affinity and its control group."""
    from dreamcomm import _C

    return _C.usable_cpus()


def report(cores: int) -> list[str]:
    """The words on a measurement, and a doubt if other processes had a part of the cores."""
    start, others = time.monotonic(), seconds_of_others()
    words = describe(measure(cores), cores)
    taken = (seconds_of_others() - others) / (time.monotonic() - start)
    if taken < BUSY:
        return [words]
    return [
        words,
        f"meanwhile other processes used {taken:.1f} of the cores, so these numbers are doubtful: "
        "run the doctor again when nothing else runs",
    ]


def seconds_of_others() -> float:
    """The time that other processes have used this process's cores; 0 where Linux hides it."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in mine:  # as: user nice system idle iowait irq softirq steal
                ticks += sum(int(one) for one in (*fields[:3], *fields[5:8]))
    except (OSError, ValueError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def describe(times: Times, cores: int) -> str:
    """The speed of each way as a multiple of one thread's, and the best one, for each model."""
    models = "; ".join(f"{model}: {compared(seconds)}" for model, seconds in times.items())
    return (
        f"training with {cores} cores measured, as multiples of the speed of one thread: {models}; "
        "ranks were measured in processes of their own, after the others"
    )


def compared(seconds: dict[str, float]) -> str:
    """The words on one model."""
    one = seconds[ONE_THREAD]
    speeds = ", ".join(
        f"{way} {one / taken:.1f} x" for way, taken in seconds.items() if way != ONE_THREAD
    )
    least = min(seconds.values())
    best = [way for way, taken in seconds.items() if taken <= least * CLOSE]
    return f"{speeds}, best {' and '.join(best)}"


def counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def why(error: Exception) -> str:
    """The reason that a measurement failed."""
    from dreamcomm.launch import RankError

    if isinstance(error, RankError):
        raised = last_words(error.traceback or "")
        return f"rank {error.rank} raised {raised}" if raised else str(error)
    return f"{type(error).__name__}: {error}"


def measure(cores: int) -> Times:
    """Trains each model in each way, with as many threads, replicas and ranks as `cores`.

    torch's threads, random numbers and grad mode are those of before afterwards.

    Raises:
        Exception: that of the step or the rank that failed.
    """
    with unchanged():
        times = {name: in_this_process(*make(), cores) for name, make in MODELS.items()}
    for name, seconds in in_ranks(cores).items():
        times[name][RANKS] = seconds
    return times


@contextmanager
def unchanged() -> Iterator[None]:
    """Gives torch its threads, random numbers and grad mode back; tensors are made on the CPU."""
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
            yield
    finally:
        torch.set_num_threads(threads)


def in_this_process(model: nn.Module, rows: Tensor, cores: int) -> dict[str, float]:
    """The median of each way's steps; the ways take turns."""
    from dreamcomm.one_process.data_parallel import DataParallel

    replicas = DataParallel(model, cores)
    ways = {ONE_THREAD: (model, 1), THREADS: (model, cores), REPLICAS: (replicas, cores)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times: dict[str, list[float]] = {way: [] for way in ways}
    end = time.monotonic() + LIMIT
    for turn in range(TURNS):
        if turn and time.monotonic() > end:
            break
        for way, (module, threads) in ways.items():
            torch.set_num_threads(threads)
            # The first steps start threads, which the system then spreads over the cores.
            times[way] += timed_steps(module, optimizer, rows)
    return {way: median(seconds) for way, seconds in times.items()}


def timed_steps(module: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> list[float]:
    """The seconds of the timed steps of a turn: forward, loss, backward and update."""
    seconds = []
    for _ in range(SETTLE + STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        F.mse_loss(module(rows), rows).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds[SETTLE:]


def in_ranks(count: int) -> dict[str, float]:
    """The median of the ranks' steps, by model; that of the slowest rank."""
    from dreamcomm.launch import spawn

    results = spawn(in_a_rank, count, start_method="spawn", init=False)
    return {name: max(result[name] for result in results) for name in MODELS}


def in_a_rank() -> dict[str, float]:
    """Runs in a rank: trains each model on this rank's part of the batch, with one thread."""
    import torch.distributed as dist

    from dreamcomm.ddp.distributed import DistributedDataParallel

    os.environ.pop("DREAMCOMM_HOSTS", None)  # it names the hosts of a job's ranks
    torch.set_num_threads(1)
    torch.manual_seed(1)  # all ranks make the same batch
    dist.init_process_group("dreamcomm", timeout=timedelta(seconds=SECONDS))
    times = {}
    for name, make in MODELS.items():
        model, batch = make()
        rows = batch.chunk(dist.get_world_size())[dist.get_rank()]
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        turns = [timed_steps(replica, optimizer, rows) for _ in range(RANK_TURNS)]
        times[name] = median(chain.from_iterable(turns))
    dist.destroy_process_group()
    return times
