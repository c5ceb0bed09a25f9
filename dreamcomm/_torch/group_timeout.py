"""Lets torch's ``_set_pg_timeout`` change the timeout of dreamcomm groups, too.

torch's own function knows only Gloo and NCCL. For other backends it warns and changes nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import timedelta

    import torch.distributed as dist

    from dreamcomm._C import DreamBackend

SETTER = "_set_pg_timeout"


def mend_timeout() -> None:
    """Wraps torch's own setter, if it has one. Called once."""
    torchs: Any = importlib.import_module("torch.distributed.distributed_c10d")
    set_others = getattr(torchs, SETTER, None)
    if set_others is None:
        return

    def _set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        ours, others = _backends_of(group)
        for backend in ours:
            backend._set_default_timeout(timeout)
        if others or not ours:
            set_others(timeout, group)

    _set_pg_timeout.__doc__ = set_others.__doc__
    setattr(torchs, SETTER, _set_pg_timeout)


def _backends_of(group: dist.ProcessGroup | None) -> tuple[list[DreamBackend], int]:
    """The group's dreamcomm backends, and how many of its devices have another backend."""
    if "dreamcomm._C" not in sys.modules:  # no group uses dreamcomm
        return [], 0
    import torch
    import torch.distributed as dist

    from dreamcomm._torch.groups import ours

    group = group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # torch raises the error
        return [], 0
    found = [ours(group, torch.device(device)) for device in group._device_types]
    backends = list({id(one): one for one in found if one is not None}.values())
    return backends, sum(one is None for one in found)
