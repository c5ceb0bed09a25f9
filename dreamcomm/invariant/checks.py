"""Refuses modules whose results would depend on which shards a rank runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm._torch.batch_norm import STATISTICS, is_batch_norm, is_sync_batch_norm
from dreamcomm.ranks.agree import gather_objects

__all__ = ["ChangedBuffers", "check_module"]


def check_module(module: nn.Module, what: str) -> None:
    """Refuses layers that need all shards of a step at once.

    Args:
        module: is looked through.
        what: is made, for the error.

    Raises:
        ValueError: a layer is ``SyncBatchNorm``, torch's or another of that name.
    """
    for name, one in module.named_modules():
        if is_sync_batch_norm(one):
            raise ValueError(
                f"{what}: layer {name!r} is {type(one).__name__}, which adds over all shards of a "
                "step, and invariant_shards= runs the shards of one rank one after the other; use "
                "BatchNorm, which normalises each shard and gets its running statistics from all "
                "of them, or GroupNorm"
            )


class _Noted(NamedTuple):
    name: str
    owner: nn.Module
    key: str
    buffer: Tensor
    version: int
    content: Tensor | None


class ChangedBuffers:
    """Finds persistent buffers that forward passes change: each rank would have other ones.

    Buffers that are not persistent and the running statistics of batch norm may change. A change
    is seen by the tensor's version. Some ways to write, such as ``buffer.data``, leave that as it
    is: ``compares`` sees these, too, and keeps a copy of each buffer meanwhile.

    Args:
        module: its passes are looked at.
        what: it is called in errors.
        compares: also the contents.
    """

    def __init__(self, module: nn.Module, what: str, *, compares: bool) -> None:
        self._module, self._what, self._compares = module, what, compares
        self._noted: list[_Noted] = []

    def note(self) -> None:
        """Remembers the buffers as they are when a step's first forward pass begins."""
        self._noted = [
            _Noted(
                name,
                owner,
                key,
                buffer,
                _version(buffer),
                _copied(buffer) if self._compares else None,
            )
            for name, owner, key, buffer in _persistent(self._module)
        ]

    def check(self, group: dist.ProcessGroup | None = None) -> None:
        """Compares after the step's last pass, before anything else changes buffers.

        Collective over the group, if one is given and the module has such buffers: its passes may
        change one on some ranks alone.

        Raises:
            RuntimeError: a buffer was changed or replaced since :meth:`note`, on any rank.
        """
        noted, self._noted = self._noted, []
        if not noted:
            return
        changed = next((one.name for one in noted if not _unchanged(one)), "")
        for rank, name in enumerate(_of_ranks(group, changed)):
            if name:
                raise RuntimeError(
                    f"{self._what}: a pass changed buffer {name!r} on rank {rank}, so its value "
                    "depends on the shards that a rank runs; change it after the step, or register "
                    "it with persistent=False if the training does not depend on it"
                )


def _of_ranks(group: dist.ProcessGroup | None, mine: str) -> list[str]:
    """Every rank's text; none where all are empty. Collective over the group, if there is one."""
    if group is None:
        return [mine]
    any_changed = torch.tensor([bool(mine)], dtype=torch.uint8, device="cpu")
    dist.all_reduce(any_changed, dist.ReduceOp.MAX, group=group)
    return gather_objects(group, mine) if any_changed else []


def _persistent(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Persistent buffers that are not batch norm's: name, owner, the owner's key, tensor."""
    for prefix, owner in module.named_modules():
        skipped = owner._non_persistent_buffers_set
        for key, buffer in owner._buffers.items():
            if buffer is None or key in skipped or (key in STATISTICS and is_batch_norm(owner)):
                continue
            yield f"{prefix}.{key}" if prefix else key, owner, key, buffer


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _copied(buffer: Tensor) -> Tensor | None:
    return buffer.detach().clone() if buffer.layout == torch.strided else None


def _unchanged(noted: _Noted) -> bool:
    now = noted.owner._buffers.get(noted.key)
    if now is not noted.buffer or _version(now) != noted.version:
        return False
    content = noted.content
    return content is None or torch.equal(now, content) or _equal_with_nan(now, content)


def _equal_with_nan(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
