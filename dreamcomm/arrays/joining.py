"""The group of a job's ranks, from the launcher's variables."""

from __future__ import annotations

import itertools
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dreamcomm.arrays.environment import Job, read_job

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from dreamcomm._C import Options

__all__ = ["join"]


def join(timeout: timedelta, options: Options | None) -> Job:
    """Makes torch's default group of all ranks of the job. Collective.

    Returns:
        The job.

    Raises:
        ValueError: the variables do not describe a job.
        DistBackendError, DistStoreError: a rank did not join in time.
    """
    job = read_job()
    store, numbers = _store_of(job.init_method, job.rank, job.size, timeout)
    prefixed = PrefixStore(f"dreamcomm/communicator/{next(numbers)}", store)
    dist.init_process_group(
        "dreamcomm",
        store=prefixed,
        rank=job.rank,
        world_size=job.size,
        timeout=timeout,
        pg_options=options,
    )
    return job


@lru_cache
def _store_of(
    init_method: str, rank: int, size: int, timeout: timedelta
) -> tuple[Store, itertools.count[int]]:
    """The job's store, and the numbers of the groups that this process makes on it.

    It is one for the life of the process: its address is, so a second one would meet keys and
    connections of the first. All ranks make their groups in one order, so the numbers agree.
    """
    store, _, _ = next(rendezvous(init_method, rank, size, timeout=timeout))
    store.set_timeout(timeout)
    return store, itertools.count()
