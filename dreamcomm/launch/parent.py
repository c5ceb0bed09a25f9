"""``dreamcomm.spawn``: ranks from a script or a notebook in one line.

The parent hosts the store, starts the ranks, and waits. Whatever ends that wait early (a rank
that raises, a rank that is killed, Ctrl-C) ends every rank before it reaches the caller.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from multiprocessing import spawn as mp_spawn
from typing import TYPE_CHECKING, Any, TypeVar

from dreamcomm._torch.timeouts import bounded
from dreamcomm.launch.loopback import LOOPBACK, check_loopback, unreachable
from dreamcomm.launch.rank_main import Job
from dreamcomm.launch.rank_process import RankProcess, start_forked, start_fresh
from dreamcomm.ranks.errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch._C._distributed_c10d import TCPStore

    from dreamcomm.launch.rank_process import Failure

R = TypeVar("R")

# A rank's failure makes its peers fail a moment later. Messages are collected for this time, so
# that the error names the first cause and not a consequence.
ECHO_SECONDS = 0.5
# The time for a rank to clean up after SIGINT or SIGTERM, before SIGKILL.
GRACE_SECONDS = 5.0
# The time for the store, which is in this process, to answer at the start.
CONNECT_SECONDS = 10.0
STORE_TIMEOUT = timedelta(minutes=5)  # for later requests; torch's own default


class RankError(Error, RuntimeError):
    """A rank failed; all other ranks have been ended.

    Attributes:
        rank: the rank that failed first.
        traceback: the text of its Python traceback, or None if it left none.
        signal: the number of the signal that killed it, or None; one of ``signal.Signals`` where
            Python has a name for it, which real-time signals mostly lack.
    """

    def __init__(self, first: Failure, others: Sequence[Failure] = ()) -> None:
        self.rank = first.rank
        self.traceback = first.traceback
        self.signal = first.signal
        lines = [f"rank {first.rank} {first.text()}"]
        lines += [f"then rank {other.rank} {other.summary()}" for other in others]
        super().__init__("\n".join(lines))


def spawn(
    fn: Callable[..., R],
    nprocs: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    backend: str = "dreamcomm",
    timeout: float | timedelta | None = None,
    options: Any = None,
    start_method: str | None = None,
    init: bool = True,
) -> list[R]:
    """Runs ``fn(*args, **kwargs)`` in ``nprocs`` processes on this host; returns their results.

    In every rank the default process group is ready: ``torch.distributed.get_rank()`` returns the
    rank. RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as
    torchrun sets them; the store is in the calling process. The cores are divided among the ranks,
    unless OMP_NUM_THREADS is set.

    Args:
        fn: a module-level function with start_method "spawn"; any callable with "fork".
        nprocs: the number of ranks, 1 or more.
        args, kwargs: the same for every rank; each rank gets its own copy.
        backend: as for ``init_process_group``: "dreamcomm", "gloo", "cpu:dreamcomm,cuda:nccl".
        timeout: the process group's timeout, in seconds or as a timedelta; None is torch's default.
        options: the backend's options, as ``init_process_group(pg_options=...)``.
        start_method: "spawn" (a fresh interpreter per rank), "fork" (a copy of this process, one
            thread per rank; not after CUDA was used here), or None: "spawn" where ``__main__``
            is a file, else "fork".
        init: False leaves ``init_process_group`` to ``fn``; the environment is set nevertheless.

    Returns:
        The results of ``fn``, by rank. They are sent pickled, tensors by value.

    Raises:
        RankError: a rank raised, was killed or ended early; the others have been ended.
        ValueError, TypeError: a bad argument, before any process is started.
        ConnectionError: 127.0.0.1 cannot be reached, before any process is started.
        KeyboardInterrupt: Ctrl-C, after the ranks have ended.
    """
    check_arguments(fn, nprocs, args, kwargs)
    method = start_method or default_start_method()
    if method not in ("spawn", "fork"):
        raise ValueError(
            f"dreamcomm.spawn: start_method must be 'spawn', 'fork' or None, got {method!r}"
        )
    if isinstance(timeout, (int, float, timedelta)):
        with suppress(ValueError):  # refused below
            timeout = bounded(timeout)
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise ValueError(
            "dreamcomm.spawn: timeout must be a positive number of seconds or timedelta, "
            f"got {timeout!r}"
        )
    threads = threads_per_rank(nprocs, method)
    job = Job(fn, tuple(args), dict(kwargs or {}), backend, timeout, options, threads, init)
    if method == "fork":
        return fork_ranks(nprocs, threads, job)
    pickled = pickle_job(job)
    return run_ranks(nprocs, threads, lambda rank, env: start_fresh(rank, env, pickled))


def check_arguments(fn: object, nprocs: object, args: object, kwargs: object) -> None:
    """Raises TypeError or ValueError for arguments that would otherwise fail inside the ranks."""
    if not callable(fn):
        raise TypeError(f"dreamcomm.spawn: fn must be a function, got {fn!r}")
    if isinstance(nprocs, bool) or not isinstance(nprocs, int):
        raise TypeError(f"dreamcomm.spawn: nprocs must be an int, got {nprocs!r}")
    if nprocs < 1:
        raise ValueError(f"dreamcomm.spawn: nprocs must be 1 or more, got {nprocs}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            "dreamcomm.spawn: args must be a tuple of fn's arguments, such as args=(x,), "
            f"got {type(args).__name__}"
        )
    if not isinstance(kwargs, (dict, type(None))):
        raise TypeError(f"dreamcomm.spawn: kwargs must be a dict, got {type(kwargs).__name__}")


def default_start_method() -> str:
    """Picks "spawn" for scripts and "fork" for notebooks and the interactive prompt.

    A fresh interpreter is the safe choice: no inherited locks, threads or CUDA state. But it
    finds ``fn`` by importing ``__main__`` from its file; a notebook's ``__main__`` has no file,
    and functions defined there exist only in this process, so the rank has to be a copy.
    """
    return "spawn" if getattr(sys.modules["__main__"], "__file__", None) else "fork"


def threads_per_rank(nprocs: int, method: str) -> int | None:
    """The CPU threads of each rank; None leaves them to the user's OMP_NUM_THREADS."""
    if method == "fork":
        return 1  # GNU OpenMP hangs in a forked child if the parent has used its threads.
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, len(os.sched_getaffinity(0)) // nprocs)


def pickle_job(job: Job) -> bytes:
    """The job, after the data that the fresh interpreter needs to find its modules."""
    preparation = mp_spawn.get_preparation_data("rank")
    preparation["authkey"] = bytes(preparation["authkey"])  # Travels by a private pipe.
    try:
        return pickle.dumps((preparation, pickle.dumps(job)))
    except Exception as error:
        raise TypeError(
            f"dreamcomm.spawn: the ranks' call cannot be pickled: {error}. Give a module-level "
            "function and plain arguments, or start_method='fork'."
        ) from error


def host_store() -> TCPStore:
    """The ranks' store, on a port the kernel picks: two spawns never race for one."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    check_loopback()
    patience = timedelta(seconds=CONNECT_SECONDS)
    try:
        store = TCPStore(
            LOOPBACK, 0, None, is_master=True, timeout=patience, wait_for_workers=False
        )
    except DistError as error:
        raise unreachable(error) from error
    store.set_timeout(STORE_TIMEOUT)  # the short timeout is only for the connection
    return store


def rank_variables(rank: int, nprocs: int, port: int, threads: int | None) -> dict[str, str]:
    """The environment of one rank, as torchrun would set it."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # Makes env:// use the running store, so that rank 0 does not host another.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return variables if threads is None else variables | {"OMP_NUM_THREADS": str(threads)}


def fork_ranks(nprocs: int, threads: int | None, job: Job) -> list[Any]:
    """Like run_ranks, but no rank begins before all are forked.

    The store's thread looks up the name of each rank that connects. A rank forked at that moment
    inherits the resolver's lock, held by a thread that it does not have.
    """
    gate = os.pipe()
    try:
        return run_ranks(
            nprocs,
            threads,
            lambda rank, env: start_forked(rank, env, job, gate),
            lambda: os.write(gate[1], bytes(nprocs)),
        )
    finally:
        for end in gate:
            os.close(end)


def run_ranks(
    nprocs: int,
    threads: int | None,
    start: Callable[[int, dict[str, str]], RankProcess],
    let_begin: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Starts all ranks, waits for them and returns their results; leaves no rank running."""
    store = host_store()
    ranks: list[RankProcess] = []
    try:
        for rank in range(nprocs):
            ranks.append(start(rank, rank_variables(rank, nprocs, store.port, threads)))
        let_begin()
        failures = watch(ranks)
        stop(ranks, signal.SIGTERM)
    except KeyboardInterrupt:
        stop(ranks, signal.SIGINT)
        raise
    finally:
        for process in ranks:
            process.close()
        # A caught error's traceback holds this frame, and would keep the store's thread alive.
        del store
    if failures:
        first, *others = sorted(failures, key=lambda failure: failure.order())
        raise RankError(first, others)
    return [result_of(process) for process in ranks]


def result_of(process: RankProcess) -> Any:
    """The result of the rank's function."""
    assert process.result is not None  # the rank has not failed
    try:
        return pickle.loads(process.result)
    except Exception as error:
        raise TypeError(
            f"dreamcomm.spawn: what rank {process.rank} returned cannot be unpickled: {error!r}"
        ) from error


def watch(ranks: Sequence[RankProcess]) -> list[Failure]:
    """Returns when all ranks have ended, or shortly after the first failure."""
    deadline: float | None = None
    while running := [rank for rank in ranks if rank.running]:
        seconds = None if deadline is None else deadline - time.monotonic()
        if seconds is not None and seconds <= 0:
            break
        sources = {source: rank for rank in running for source in rank.sources()}
        for source in connection.wait(list(sources), seconds):
            sources[source].hear(source)
        if deadline is None and any(rank.failure for rank in ranks):
            deadline = time.monotonic() + ECHO_SECONDS
    return [rank.failure for rank in ranks if rank.failure is not None]


def stop(ranks: Sequence[RankProcess], number: signal.Signals) -> None:
    """Sends the signal, gives the ranks time to clean up, and kills those that remain.

    A second Ctrl-C while waiting ends the wait.
    """
    try:
        for rank in ranks:
            rank.send_signal(number)
        deadline = time.monotonic() + GRACE_SECONDS
        while running := [rank.ending.descriptor for rank in ranks if rank.running]:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                break
            for ready in connection.wait(running, seconds):
                next(rank for rank in ranks if rank.ending.descriptor == ready).reap()
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.reap()
