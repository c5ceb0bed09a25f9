"""What a module has after fully_shard, in each form."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed.fsdp as torchs
from torch import Tensor

from dreamcomm.invariant.loop import ShardLoop

__all__ = ["FSDPModule", "UnshardHandle"]


class UnshardHandle(torchs.UnshardHandle):
    """What ``unshard(async_op=True)`` returns: there is nothing left to wait for."""

    def wait(self) -> None:
        """Returns at once: the parameters lie where they are read."""


class FSDPModule(torchs.FSDPModule):
    """The class that :func:`dreamcomm.zero.fully_shard` gives a module, in front of its own.

    It has all methods of torch's FSDPModule, and these.
    """

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside add to this rank's own gradients; a later one, or
        :meth:`reduce_gradients`, or an optimizer's step reduces the sum."""
        raise NotImplementedError

    def count(self, number: float | Tensor) -> None:
        """Says what the losses of the next backward pass are sums over; with ``reduce="tokens"``.

        As :meth:`dreamcomm.DistributedDataParallel.count`.
        """
        raise NotImplementedError

    @property
    def shards(self) -> ShardLoop:
        """With ``invariant_shards``: called, it loops over this rank's shards of a step."""
        raise NotImplementedError

    def mean(self, losses: Tensor | Sequence[Tensor | float]) -> Tensor:
        """The mean of all shards' losses. Collective."""
        raise NotImplementedError

    def reduce_gradients(self) -> None:
        """Reduces what has accumulated under :meth:`no_sync`. Collective."""
        raise NotImplementedError

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``. Collective.

        Args:
            max_norm: the largest norm.
            norm_type: the p of the norm; ``inf`` is the largest absolute value.
            error_if_nonfinite: raise where the norm is infinite or NaN, and change nothing.

        Returns:
            The norm before, a float32 tensor of no dimension, the same on all ranks.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
        """
        raise NotImplementedError

    def report(self) -> str:
        """In which form the module is sharded, why, and what it takes of memory."""
        raise NotImplementedError

    def rewrite(self) -> AbstractContextManager[bool]:
        """Lets the lowest rank alone write whole parameters in place. Collective.

        Inside, that rank has whole parameters registered, and gets True; the others get False, and
        must not write. All ranks have the result afterwards. For initialisation, surgery, or a
        full checkpoint that one rank reads.

        Raises:
            Error: the body has raised on another rank.
        """
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(
            f"{type(self).__name__}: a module under fully_shard cannot be copied: its parameters "
            "are this rank's rows of tensors that all ranks share. For averages of weights copy "
            "the shards, as {name: p.detach().clone() for name, p in module.named_parameters()}; "
            "for another model make the module anew and load its state_dict()"
        )
