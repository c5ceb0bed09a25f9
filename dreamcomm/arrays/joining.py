"""The group of a job's ranks, from the launcher's variables."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from dreamcomm.arrays.environment import Job, read_job

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from dreamcomm._C import Options

__all__ = ["join"]

PAUSE = 0.02  # seconds between two attempts to reach rank 0, which may start later


def join(timeout: timedelta, options: Options | None) -> Job:
    """Makes torch's default group of all ranks of the job. Collective.

    Returns:
        The job.

    Raises:
        ValueError: the variables do not describe a job.
        DistBackendError, DistStoreError: a rank did not join in time, or the port is in use.
    """
    job = read_job()
    store, numbers = _store_of(job, _address(job), timeout)
    store.set_timeout(timeout)
    prefixed = dist.PrefixStore(f"dreamcomm/communicator/{job.name}/{next(numbers)}", store)
    dist.init_process_group(
        "dreamcomm",
        store=prefixed,
        rank=job.rank,
        world_size=job.size,
        timeout=timeout,
        pg_options=options,
    )
    return job


def _address(job: Job) -> str:
    """Where the ranks meet. One rank meets nobody, and its job has no address."""
    if job.size == 1:
        return ""
    if job.init_method != "env://":
        return job.init_method
    return f"tcp://[{os.environ['MASTER_ADDR'].strip('[]')}]:{os.environ['MASTER_PORT']}"


_stores: dict[tuple[Job, str], tuple[Store, itertools.count[int]]] = {}
