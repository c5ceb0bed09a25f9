"""Checks that take several ranks: two of this machine, and those of a job."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import dropwhile

from dreamcomm.tools.doctor.finding import GLOO_INSTEAD, Finding, Severity

__all__ = ["hosts", "two_ranks"]

SECONDS = 60.0  # limit for the ranks' bootstrap


def carried_by() -> str:
    """Runs in a rank: makes a call, and returns the group's transport."""
    import torch
    import torch.distributed as dist

    from dreamcomm.info import transport

    os.environ.pop("DREAMCOMM_HOSTS", None)  # it names the hosts of a job's ranks
    dist.init_process_group("dreamcomm", timeout=timedelta(seconds=SECONDS))
    data = torch.ones(1000, device="cpu")
    dist.all_reduce(data)
    found = f"{transport()}; 1 + 1 = {data[0].item():g}"
    dist.destroy_process_group()
    return found


def two_ranks() -> Finding:
    """Two processes make a group and add numbers, as in a job."""
    from dreamcomm.launch import RankError, spawn

    try:
        first, _ = spawn(carried_by, 2, start_method="spawn", init=False)
    except RankError as error:
        raised = last_words(error.traceback or "")
        why = f"rank {error.rank} raised {raised}" if raised else str(error)
        return Finding("two ranks", Severity.BROKEN, "failed", why)
    except (OSError, RuntimeError, ValueError) as error:
        return Finding("two ranks", Severity.BROKEN, "failed", str(error))
    state = Severity.FINE if first.startswith("shm") else Severity.FALLS_BACK
    return Finding("two ranks", state, first, "" if state is Severity.FINE else GLOO_INSTEAD)


def last_words(traceback: str) -> str:
    """The error that a traceback ends with, which may have several lines."""
    lines = traceback.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    return "\n".join(dropwhile(lambda line: line.startswith(" "), lines))


def hosts() -> Finding:
    """The ranks of a job that share memory, and why others do not; collective in these ranks."""
    import torch.distributed as dist

    from dreamcomm._torch.groups import backend_of
    from dreamcomm.info import explain, transport

    try:
        dist.init_process_group("dreamcomm", timeout=timedelta(seconds=SECONDS))
    except (RuntimeError, ValueError) as error:
        return Finding("hosts", Severity.BROKEN, "the ranks could not meet", str(error))
    try:
        backend = backend_of(None)
        if not backend.shares_memory:
            return Finding("hosts", Severity.FALLS_BACK, transport(), GLOO_INSTEAD)
        if len(backend.hosts) == 1:
            return Finding("hosts", Severity.FINE, transport())
        meaning = explain("all_reduce", 1 << 20)
        return Finding("hosts", Severity.NOTE, transport(), meaning)
    finally:
        dist.destroy_process_group()
