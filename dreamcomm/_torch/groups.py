"""Finds the backend of dreamcomm in torch's process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from dreamcomm._torch.build_check import check_build

if TYPE_CHECKING:
    from dreamcomm._C import DreamBackend

__all__ = ["as_ours", "backend_of", "given_group", "group_like", "ours", "shared_group_like"]

CPU = torch.device("cpu")


def backend_of(group: dist.ProcessGroup | None) -> DreamBackend:
    """The group's dreamcomm backend. Raises ValueError if it has none."""
    group = given_group(group)
    for device in group._device_types:
        backend = ours(group, torch.device(device))
        if backend is not None:
            return backend
    raise ValueError("the group does not use the backend dreamcomm")


def given_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one. Raises ValueError if there is none."""
    if group is None:
        group = dist.group.WORLD
    if group is None:
        raise ValueError('no default group: call init_process_group("dreamcomm") first')
    given: object = group
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"this rank is not a member of the group {given!r}")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"expected a process group or None, got {given!r}")
    return group


def ours(group: dist.ProcessGroup, device: torch.device) -> DreamBackend | None:
    """The backend of the group's tensors on a device, if it is dreamcomm; else None."""
    return as_ours(group._get_backend(device))


def as_ours(backend: Any) -> DreamBackend | None:
    """A backend of a group, if it is dreamcomm's; else None."""
    check_build()
    from dreamcomm._C import DreamBackend

    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a checking backend around ours.
    backend = getattr(backend, "wrapped_pg", backend)
    return backend if isinstance(backend, DreamBackend) else None


def group_like(
    group: dist.ProcessGroup, ranks: Sequence[int] | None = None, *, desc: str
) -> dist.ProcessGroup:
    """Another group for CPU tensors, of the same backend, options and timeout. Collective.

    Args:
        group: whose ranks and options they are.
        ranks: of ``group``, those of the new one; None: all.
        desc: what the new one is for.
    """
    everyone = dist.get_process_group_ranks(group)
    backend = ours(group, CPU)
    names = dict(one.split(":") for one in dist.get_backend_config(group).split(","))
    made: dist.ProcessGroup = dist.new_group(
        everyone if ranks is None else [everyone[one] for one in ranks],
        backend=f"cpu:{names['cpu']}",
        timeout=group._get_backend(CPU).options._timeout,
        pg_options=None if backend is None else backend.options,
        use_local_synchronization=True,
        group_desc=desc,
    )
    return made


def shared_group_like(group: dist.ProcessGroup, *, desc: str) -> dist.ProcessGroup:
    """The group that an earlier call has made with these arguments, or a new one. Collective.

    torch keeps it until it destroys the default group.
    """
    desc = f"{desc} of {group.group_name}"
    world = cast(Any, dist.distributed_c10d)._world
    made: list[dist.ProcessGroup] = [one for one in world.pg_map if one.group_desc == desc]
    return made[0] if made else group_like(group, desc=desc)
