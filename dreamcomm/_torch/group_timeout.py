"""torch's way to change a group's timeout later on, for groups of dreamcomm too.

``_set_pg_timeout`` of torch knows the backends Gloo and NCCL alone: it warns, and changes nothing.
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
    """Wraps torch's own setter, where it has one: it knows Gloo and NCCL alone. Called once."""
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
    """Those of dreamcomm, and how many devices of the group have another one."""
    if "dreamcomm._C" not in sys.modules:  # no group is of dreamcomm
        return [], 0
    import torch
    import torch.distributed as dist

    from dreamcomm._torch.groups import ours

    group = group or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # torch says so
        return [], 0
    found = [ours(group, torch.device(device)) for device in group._device_types]
    backends = list({id(one): one for one in found if one is not None}.values())
    return backends, sum(one is None for one in found)
