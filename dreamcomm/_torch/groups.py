"""Finds the backend of dreamcomm in torch's process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dreamcomm._torch.build_check import check_build

if TYPE_CHECKING:
    from dreamcomm._C import DreamBackend

__all__ = ["as_ours", "backend_of", "given_group", "ours"]


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
