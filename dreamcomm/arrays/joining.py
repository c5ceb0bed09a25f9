"""The group of a job's ranks, from the launcher's variables."""

from __future__ import annotations

import itertools
import os
import socket
import time
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

from dreamcomm.arrays.environment import Job, read_job

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from dreamcomm._C import Options

__all__ = ["join"]

PAUSE = 0.02  # seconds between two attempts to reach rank 0, which may start later
MOST = 60.0  # seconds of one attempt: a host that does not answer may be one that starts


def join(timeout: timedelta, options: Options | None) -> Job:
    """Makes torch's default group of all ranks of the job. Collective.

    Returns:
        The job.

    Raises:
        ValueError: the variables do not describe a job.
        DistBackendError, DistStoreError: a rank did not join in time, or rank 0's port is in use.
    """
    job = read_job()
    store, number = _store_of(job, timeout)
    store.set_timeout(timeout)
    prefixed = PrefixStore(f"dreamcomm/communicator/{job.name}/{number}", store)
    dist.init_process_group(
        "dreamcomm",
        store=prefixed,
        rank=job.rank,
        world_size=job.size,
        timeout=timeout,
        pg_options=options,
    )
    return job


class _Server(NamedTuple):
    """The host and port where rank 0 or the launcher has the store."""

    host: str
    port: int


class _Kept:
    """A job's store, and the numbers of the groups that this process makes on it."""

    def __init__(self) -> None:
        self.store: Store | None = None
        self.numbers = itertools.count()


@lru_cache
def _kept(place: _Server | str, job: Job) -> _Kept:
    """What this process keeps for its life: the store's address is one for all of it.

    A second store would find the keys and connections of the first. All ranks make their groups in
    one order, so the numbers agree.
    """
    return _Kept()


def _store_of(job: Job, timeout: timedelta) -> tuple[Store, int]:
    """The job's store, and the number of the next group on it. A job of one rank has no address."""
    if job.size == 1:
        return HashStore(), 0
    place = _place(job)
    kept = _kept(place, job)
    if kept.store is None:
        if isinstance(place, str):
            kept.store = FileStore(place, job.size)
        else:
            kept.store = _connected(place, job, timeout)
    return kept.store, next(kept.numbers)


def _place(job: Job) -> _Server | str:
    """The address of the store, or its file."""
    if job.init_method.startswith("file://"):
        return job.init_method.removeprefix("file://")
    if job.init_method == "env://":
        return _Server(os.environ["MASTER_ADDR"].strip("[]"), int(os.environ["MASTER_PORT"]))
    parts = urlsplit(job.init_method)
    return _Server(parts.hostname or "", parts.port or 0)


def _connected(server: _Server, job: Job, timeout: timedelta) -> Store:
    """Starts the store on rank 0, unless the launcher has; connects to it on the others.

    Rank 0 does not wait for the others here: the group names those that are missing.
    """
    has_agent = job.init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    is_server = job.rank == 0 and has_agent != "True"
    if not is_server:
        _await_server(server, job, timeout)
    try:
        return TCPStore(
            *server,
            job.size,
            is_server,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise _failure(server, job, "has no store", error) from error


def _await_server(server: _Server, job: Job, timeout: timedelta) -> None:
    """Waits until rank 0 listens. torch's store would try for some two to three times as long."""
    end = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            left = max(PAUSE, min(end - time.monotonic(), MOST))
            socket.create_connection(server, left).close()
            return
        except OSError as error:
            if time.monotonic() + PAUSE > end:
                why = f"has not come within the timeout of {timeout.total_seconds():g} s"
                raise _failure(server, job, why, error) from error
            time.sleep(PAUSE)


def _failure(server: _Server, job: Job, why: str, error: Exception) -> dist.DistStoreError:
    remedy = (
        "All ranks must be started, and reach that port of rank 0's host"
        if job.rank
        else "Another job may use the port: set MASTER_ADDR and MASTER_PORT on all ranks"
    )
    return dist.DistStoreError(
        f"Communicator on rank {job.rank} of {job.size}, started by {job.launcher}: rank 0 {why} "
        f"at {server.host}, port {server.port}: {str(error).splitlines()[0]}. {remedy}"
    )
