"""Checks the installation and the machine: what works, what falls back, and why.

Every check is a function that returns a :class:`Finding` and raises nothing; :func:`examine` runs
them in order. The last two checks start processes, and a job of torchrun has one more, of its ranks.
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
    parallelism.parallelism,
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
    yield from examine_here()


def in_job() -> bool:
    """Whether torchrun has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def examine_here() -> Iterator[Finding]:
    """The checks of this machine."""
    first = installation.build()
    yield first
    for check in ALWAYS:
        yield check()
    if first.state is Severity.BROKEN:
        return
    for check in WITH_BUILD:
        found = check()
        yield found
        if found.state is Severity.BROKEN:  # the next would fail of the same
            return
