"""Checks the installation and the machine: what works, what falls back, and why.

Every check is a function that returns a :class:`Finding` and raises nothing; :func:`examine` runs
them in order. The last two start processes. A job of torchrun has another, which uses its ranks,
in place of the last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from dreamcomm.tools.doctor import gpus, installation, machine, namespaces, parallelism, ranks
from dreamcomm.tools.doctor.finding import Finding, Severity

__all__ = ["Finding", "Severity", "examine"]

ALWAYS: tuple[Callable[[], Finding], ...] = (
    machine.shared_memory,
    machine.descriptors,
    namespaces.namespaces,
    machine.endings,
    machine.open_files,
    machine.address_space,
    machine.memory,
    machine.costs,
    machine.gloo,
)
WITH_BUILD: tuple[Callable[[], Finding], ...] = (
    installation.processors,
    gpus.cuda,
    gpus.peers,
    installation.settings,
    installation.buckets,
    machine.loopback,
    ranks.two_ranks,
)


def examine() -> Iterator[Finding]:
    """Runs the checks; those that need the compiled module only where it loads.

    In a job of torchrun the first rank of each machine runs them, and all ranks the one of hosts.
    """
    if in_job():
        if os.environ.get("LOCAL_RANK") == "0":
            yield from examine_here()
        found = ranks.hosts()
        if os.environ["RANK"] == "0" or found.state is Severity.BROKEN:
            yield found
        return
    yield from examine_here(parallelism.parallelism)  # a job's ranks would share the cores with it


def in_job() -> bool:
    """Whether torchrun has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def examine_here(*last: Callable[[], Finding]) -> Iterator[Finding]:
    """The checks of this machine, and those that come last."""
    first = installation.build()
    yield first
    for check in ALWAYS:
        yield check()
    if first.state is Severity.BROKEN:
        return
    for check in (*WITH_BUILD, *last):
        found = check()
        yield found
        if found.state is Severity.BROKEN:  # the next would fail of the same
            return
