"""Cancels batches of calls that end by an exception.

torch ends a batch (``batch_isend_irecv``, a coalescing block) only if no exception escapes it.
After an exception, such as Ctrl-C or an unsupported tensor, torch adds the group's later
collectives to that batch: ``all_reduce`` returns at once and has reduced nothing. So the batch of a
dreamcomm group is cancelled then. Batches of other backends are not changed.
"""

from __future__ import annotations

import importlib
import logging
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

MANAGER = "_coalescing_manager"
Batches = dict["dist.ProcessGroup", Any]  # torch's, that have begun


class Batch(AbstractContextManager[Any, None]):
    """One batch of a group. It is no generator: Ctrl-C could interrupt one before it has begun."""

    def __init__(
        self,
        manager: AbstractContextManager[Any],
        group: dist.ProcessGroup | None,
        batches: Batches,
    ) -> None:
        self._manager = manager
        self._group = group
        self._batches = batches
        self._begins = group is not None and group not in batches  # not within another batch

    def __enter__(self) -> Any:
        try:
            return self._manager.__enter__()
        except BaseException:
            self._cancel()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ends_well = False
        try:
            self._manager.__exit__(kind, error, trace)
            ends_well = error is None
        finally:
            if not ends_well:
                self._cancel()

    def _cancel(self) -> None:
        if not self._begins or self._group is None:
            return
        try:
            cancel(self._group, self._batches)
        except Exception:  # the exception that ended the batch matters more
            logging.getLogger("dreamcomm").warning("a batch could not be cancelled", exc_info=True)


def mend_batches() -> None:
    """Wraps torch's own manager of batches, where it has one; called once."""
    torchs: Any = importlib.import_module("torch.distributed.distributed_c10d")
    whole: Any = importlib.import_module("torch.distributed")
    manage = getattr(torchs, MANAGER, None)
    if manage is None:
        return

    def _coalescing_manager(
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        async_ops: bool = False,
    ) -> Batch:
        meant = group or whole.group.WORLD
        return Batch(manage(group, device, async_ops), meant, torchs._world.pg_coalesce_state)

    for module in (torchs, whole):
        setattr(module, MANAGER, _coalescing_manager)


def cancel(group: dist.ProcessGroup, batches: Batches) -> None:
    """Ends the group's batch: its receives are cancelled; its sends still complete."""
    if "dreamcomm._C" not in sys.modules:  # no group uses dreamcomm
        return
    from dreamcomm._torch.groups import backend_of

    try:
        backend = backend_of(group)
    except ValueError:  # another backend's group
        return
    batches.pop(group, None)
    backend._cancel_batch()
