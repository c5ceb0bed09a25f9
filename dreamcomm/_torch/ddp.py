"""torch's DistributedDataParallel as dreamcomm's builds on it, with types.

torch leaves most of the class without annotations, and keeps what is needed of its module private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import distributed

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "TorchDDP",
    "broadcast_buffers_",
    "broadcast_module",
    "broadcast_tensors",
    "find_tensors",
    "hidden_from_dynamo",
    "unseen_by_dynamo",
]

F = TypeVar("F", bound=Callable[..., Any])
BROADCAST_BYTES = 250 << 20  # of one message, as torch has it
SMALL_BYTES = 128 << 10  # tensors below it are put together

if TYPE_CHECKING:

    class TorchDDP(nn.Module, Joinable):
        """What torch's class has, as far as it is used here."""

        broadcast_buffers: bool
        modules_buffers: list[Tensor]
        named_module_buffers: dict[str, Tensor]
        require_forward_param_sync: bool

        def _assign_modules_buffers(self) -> None: ...
        def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]: ...
        def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any: ...
        def _check_sync_bufs_post_fwd(self) -> bool: ...
        def _sync_buffers(self) -> None: ...
        def will_sync_module_buffers(self) -> bool: ...
        def _sync_module_buffers(self, authoritative_rank: int) -> None: ...
        def _check_comm_hook(self, hook: Callable[..., Any]) -> None: ...
        def _check_default_group(self) -> None: ...
        def _check_and_sync_module_buffers(self) -> None: ...
        def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool: ...
        def _sync_final_model(self, is_last_joiner: bool) -> None: ...
        def no_sync(self) -> AbstractContextManager[None]: ...
        def __setstate__(self, state: dict[str, Any]) -> None: ...
        @property
        def join_device(self) -> torch.device: ...
        @property
        def join_process_group(self) -> Any: ...

else:
    TorchDDP = nn.parallel.DistributedDataParallel


def find_tensors(output: Any) -> list[Tensor]:
    """All tensors in what a module returns: in lists, tuples, dicts and dataclasses."""
    found: Iterator[Tensor] = cast(Any, distributed)._find_tensors(output)
    return list(found)


def hidden_from_dynamo(function: F) -> F:
    """Has torch.compile skip the function itself; what it calls is compiled."""
    hide = cast(Any, torch)._disable_dynamo
    return cast(F, hide(function, recursive=False))


def unseen_by_dynamo(function: F) -> F:
    """Has torch.compile compile neither the function nor what it calls."""
    return cast(F, cast(Any, torch)._disable_dynamo(function, recursive=True))


def broadcast_module(
    module: nn.Module, group: dist.ProcessGroup, ignored: set[str], *, buffers: bool
) -> None:
    """Gives a module rank 0's parameters, and its buffers. Collective."""
    _sync_module_states(
        module=module,
        process_group=group,
        broadcast_bucket_size=BROADCAST_BYTES,
        src=0,
        params_and_buffers_to_ignore=ignored,
        broadcast_buffers=buffers,
    )


def broadcast_buffers_(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Gives buffers rank 0's values; autograd does not see it as a change. Collective."""
    versions = cast(Any, torch.autograd)._unsafe_preserve_version_counter
    with torch.no_grad(), versions(tuple(buffers)):
        cast(Any, dist)._broadcast_coalesced(group, list(buffers), BROADCAST_BYTES, 0)


def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Gives tensors rank 0's values. Collective. Large ones take no other memory meanwhile."""
    with torch.no_grad():
        plain = [one.detach() for one in tensors]
        small = [one for one in plain if one.nbytes < SMALL_BYTES]
        for one in plain:
            if one.nbytes >= SMALL_BYTES:
                dist.broadcast(one, group=group, group_src=0)
        if small:
            cast(Any, dist)._broadcast_coalesced(group, small, BROADCAST_BYTES, 0)
