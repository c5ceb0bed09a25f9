"""Batches of calls that an exception leaves.

torch forgets a batch (``batch_isend_irecv``, a coalescing block) only where it ends in good order.
After an exception in one, as Ctrl-C or a tensor that nobody carries, it takes the group's later
collectives for more of that batch: ``all_reduce`` returns at once and has reduced nothing. So a
batch of a group of dreamcomm is given up then; those of other backends are left as they are.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

MANAGER = "_coalescing_manager"


def mend_batches() -> None:
    """Wraps torch's own manager of batches, where it has one; called once."""
    torchs: Any = importlib.import_module("torch.distributed.distributed_c10d")
    whole: Any = importlib.import_module("torch.distributed")
    manage = getattr(torchs, MANAGER, None)
    if manage is None:
        return

    @contextmanager
    def _coalescing_manager(
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        async_ops: bool = False,
    ) -> Iterator[Any]:
        meant = group or whole.group.WORLD
        begins = meant is not None and meant not in torchs._world.pg_coalesce_state
        try:
            with manage(group, device, async_ops) as manager:
                yield manager
        except BaseException:
            if begins:
                give_up(meant, torchs._world.pg_coalesce_state)
            raise

    for module in (torchs, whole):
        setattr(module, MANAGER, _coalescing_manager)


def give_up(group: dist.ProcessGroup, batches: dict[dist.ProcessGroup, Any]) -> None:
    """Forgets the group's batch: receives are withdrawn, and sends stay under way."""
    if "dreamcomm._C" not in sys.modules:  # no group is of dreamcomm
        return
    from dreamcomm.info import backend_of

    try:
        backend = backend_of(group)
    except ValueError:  # another's
        return
    batches.pop(group, None)
    backend._give_up_batch()
