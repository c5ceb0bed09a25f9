"""Information on a group: byte counters, the choice of algorithm, missing ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from dreamcomm._torch.ddp_memory import advice
from dreamcomm._torch.groups import backend_of, given_group, ours
from dreamcomm._torch.timeouts import bounded

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["averages", "explain", "monitored_barrier", "stats", "transport"]


def stats(group: dist.ProcessGroup | None = None) -> dict[str, dict[str, int]]:
    """Counts this rank's calls and bytes since the group was made.

    Args:
        group: a group with the backend dreamcomm; None is the default group.

    Returns:
        For each operation ("all_reduce", "send", ...) a dict of counters: ``calls``; the bytes
        ``sent`` (read by peers from this rank, counted once per reader) and ``received`` (read by
        this rank from its peers); and ``in_place``, the number of calls on tensors in the shared
        heap. In a multi-node group the last three count the parts of calls within this rank's
        host, under the parts' names; ``sent_between_hosts`` and ``received_between_hosts`` count
        the bytes of calls between hosts. Calls on tensors on GPUs, and those that torch's own
        Gloo or NCCL group carried, are not counted.

    Raises:
        ValueError: the group does not use dreamcomm, or this rank is not in it.
    """
    return backend_of(group).stats()


def explain(
    op: str,
    nbytes: int,
    world: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    shared: bool = False,
) -> str:
    """Explains how a call would run: the algorithm, the others with predicted times, and why.

    Args:
        op: "all_reduce", "broadcast", "all_gather", ...
        nbytes: bytes of one rank's block: of its tensor; for reduce_scatter and scatter of its
            output; for all_to_all of its whole input.
        world: the number of ranks of an assumed group on this host; no group is needed then. The
            costs are those that an earlier group of this size has measured, or fixed ones.
        group: used without ``world``: a group with the backend dreamcomm; None is the default
            group.
        shared: assume tensors in the shared heap on all ranks (:func:`dreamcomm.empty`).

    Returns:
        The explanation as text.

    Raises:
        TypeError: ``nbytes`` is no int.
        ValueError: the operation or the group is unknown, ``nbytes`` negative or beyond 64 bits,
            or ``world`` below 1.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f"explain: expected nbytes to be an int, got {nbytes!r}")
    if not 0 <= nbytes < 1 << 63:
        raise ValueError(f"explain: expected nbytes from 0 to 2**63 - 1, got {nbytes}")
    if world is None:
        backend = backend_of(group)
        said = backend.explain(op, nbytes, shared)
        return said + advice(op) if backend.shares_memory and not shared else said
    from dreamcomm._torch.build_check import check_build

    check_build()
    from dreamcomm._C import explain as explain_world

    return explain_world(op, nbytes, world, shared)


def transport(group: dist.ProcessGroup | None = None) -> str:
    """Names the group's transport, such as "shm (memfd), 4 ranks in one host"."""
    return backend_of(group).transport


def averages(tensor: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Whether dreamcomm itself averages the tensor in that group, in float32 if it has 16 bits.

    Otherwise torch's Gloo or NCCL does, or the group's backend for the tensor's device. All ranks
    get the same answer. If it is the group's first call on a GPU, all ranks have to call it.
    """
    try:
        backend = ours(given_group(group), tensor.device)
    except RuntimeError:
        return False  # the group has none for such a device
    return backend is not None and backend._averages(tensor)


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Waits until all ranks call it; if some do not, names them. The group stays usable.

    Args:
        group: a group with the backend dreamcomm; None is the default group.
        timeout: how long to wait, in seconds or as a timedelta; None is the group's timeout. The
            shortest of the ranks' timeouts ends the barrier for all ranks in it.
        wait_all_ranks: rank 0 names all missing ranks, not only the first. If one cannot arrive,
            the others have half a second more to arrive.

    Raises:
        ValueError: the timeout is less than a millisecond, or no finite number.
        DistBackendError: ranks were missing at the timeout. It is raised at once if a rank has
            ended, has left or has stopped waiting. Rank 0 names the ranks; the others repeat rank
            0's error. A rank that arrives after rank 0 has stopped waiting learns that it was late.
    """
    if timeout is not None:
        timeout = as_timeout("monitored_barrier", timeout)
    backend_of(group).monitored_barrier(timeout, wait_all_ranks)


def as_timeout(call: str, given: timedelta | float) -> timedelta:
    """The timeout as a timedelta. Raises ValueError below a millisecond, or if not finite."""
    try:
        timeout = bounded(given)
    except ValueError:  # inf, nan
        timeout = timedelta(0)
    if timeout < timedelta(milliseconds=1):
        raise ValueError(
            f"{call}: expected a timeout of a millisecond at least, in seconds or as timedelta, "
            f"got {given!r}"
        )
    return timeout
