"""Makes the messenger of a group, by what can carry its messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm._torch.groups import as_ours
from dreamcomm.messages.codec import Codec
from dreamcomm.messages.gloo_endpoint import GlooEndpoint
from dreamcomm.messages.messenger import Messenger
from dreamcomm.messages.shared_endpoint import SharedEndpoint

if TYPE_CHECKING:
    from dreamcomm._C import DreamBackend

__all__ = ["messenger_on", "messenger_over"]

MOST_PLACED = 64 << 20  # bytes that receivers have not taken yet


def messenger_over(group: dist.ProcessGroup, tag: int) -> Messenger:
    """The messenger of a torch group.

    Args:
        group: of any backend for tensors of the CPU.
        tag: the first of a unit (ranks/tags.py), equal on all ranks and no other's.
    """
    on_cpu = group._get_backend(torch.device("cpu"))

    def backend_of(tensor: Tensor) -> Any:
        return on_cpu if tensor.is_cpu else group._get_backend(tensor.device)

    return _made(on_cpu, backend_of, dist.get_rank(group), dist.get_world_size(group), tag)


def messenger_on(backend: DreamBackend, tag: int, most_placed: int = MOST_PLACED) -> Messenger:
    """The messenger of a backend that no torch group holds.

    Args:
        backend: dreamcomm's.
        tag: as of :func:`messenger_over`.
        most_placed: bytes that may wait in the heap for their receivers; what goes beyond is sent
            from where it is.
    """
    return _made(backend, lambda _: backend, backend.rank(), backend.size(), tag, most_placed)


def _made(
    on_cpu: Any,
    backend_of: Callable[[Tensor], Any],
    rank: int,
    size: int,
    tag: int,
    most_placed: int = MOST_PLACED,
) -> Messenger:
    codec, ours = Codec(), as_ours(on_cpu)
    if ours is not None and ours.shares_memory:
        return Messenger(SharedEndpoint(ours, backend_of, tag, codec, most_placed), codec)
    return Messenger(GlooEndpoint(on_cpu, backend_of, rank, size, tag, codec), codec)
