"""Gives batch norm in a pipeline the running statistics of the whole batch.

Each micro-batch is normalised by its own statistics. Plain layers would also update the running
ones once for each micro-batch, in an order that the schedule decides. Here the statistics of the
micro-batches are collected and the update is made once for each step, as with the whole batch
(Kim et al., "torchgpipe", 2020, section 3.2: deferred batch normalization).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dreamcomm._torch.batch_norm import BatchStatistics, batch_statistics, is_batch_norm
from dreamcomm.sync_batch_norm.layer import SyncBatchNorm

__all__ = ["DeferredBatchNorm"]


@dataclass
class _Statistics:
    """A number of rows, their mean and the sum of their squared deviations from it."""

    count: int
    mean: Tensor
    squares: Tensor

    def __add__(self, other: _Statistics) -> _Statistics:
        """Merges two groups of rows (Chan, Golub, LeVeque 1983)."""
        count = self.count + other.count
        step = other.mean - self.mean
        return _Statistics(
            count,
            self.mean + step * (other.count / count),
            self.squares + other.squares + step * step * (self.count * other.count / count),
        )


@dataclass
class _Collected:
    """What one layer has collected: for each micro-batch the statistics of its calls, in order."""

    by_microbatch: dict[int, list[_Statistics]] = field(default_factory=dict)

    def of_call(self, call: int) -> _Statistics:
        """Merges the micro-batches in order, so that the bits do not depend on the schedule."""
        ordered = [self.by_microbatch[index] for index in sorted(self.by_microbatch)]
        parts = [calls[call] for calls in ordered if call < len(calls)]
        return sum(parts[1:], start=parts[0])

    @property
    def calls(self) -> int:
        return max((len(calls) for calls in self.by_microbatch.values()), default=0)


class DeferredBatchNorm:
    """Collects the statistics of batch norm layers over a step's micro-batches.

    Layers in evaluation mode or without running statistics run as they are.
    This library's ``SyncBatchNorm`` takes part with the rows of all its ranks. torch's and others
    of that name are left alone, and so is ``InstanceNorm``.
    A layer within a compiled function is not deferred reliably.

    Example::

        with deferred.step():
            for index, part in enumerate(parts):
                with deferred.at(index):
                    stage(part)
            ...backward passes...
        deferred.commit()

    Args:
        modules: the batch norm layers, or modules that contain them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = (part for module in modules for part in module.modules())
        self._layers = [part for part in dict.fromkeys(parts) if _takes_part(part)]
        self._collected: dict[_BatchNorm, _Collected] = {}
        self._microbatch: int | None = None
        self._in_step = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keeps the layers' buffers as they are within the context.

        What runs within it but outside of :meth:`at` is not collected; that is right for passes
        that a checkpoint repeats. An error discards what was collected. Outside of the context
        nothing on the layers is changed.

        Raises:
            RuntimeError: if the context is entered within itself.
        """
        if self._in_step:
            raise RuntimeError("step() cannot be entered within another step()")
        self._in_step = True
        try:
            with batch_statistics(self._layers, self._collect):
                yield
        except BaseException:
            self.discard()
            raise
        finally:
            self._in_step = False

    @contextmanager
    def at(self, microbatch: int) -> Iterator[None]:
        """Collects within the context, for the micro-batch of this number.

        A micro-batch entered again replaces nothing: its calls count as further calls.
        """
        before, self._microbatch = self._microbatch, microbatch
        try:
            yield
        finally:
            self._microbatch = before

    def commit(self) -> None:
        """Updates the running statistics with what was collected, and forgets that.

        A layer that each micro-batch calls several times is updated as often, as it would be with
        the whole batch.
        """
        collected, self._collected = self._collected, {}
        for layer, found in collected.items():
            for call in range(found.calls):
                _update(layer, found.of_call(call))

    def discard(self) -> None:
        """Forgets what was collected, after a failed step."""
        self._collected.clear()

    def _collect(self, layer: _BatchNorm, batch: BatchStatistics) -> None:
        if self._microbatch is None:
            return
        own = batch.output.numel() // batch.output.shape[1]
        count = layer.rows if isinstance(layer, SyncBatchNorm) else own
        if count == 0:
            return
        found = _Statistics(count, batch.mean.double(), batch.variance.double() * (count - 1))
        collected = self._collected.setdefault(layer, _Collected())
        collected.by_microbatch.setdefault(self._microbatch, []).append(found)


def _takes_part(module: nn.Module) -> TypeGuard[_BatchNorm]:
    return is_batch_norm(module) or isinstance(module, SyncBatchNorm)


@torch.no_grad()
def _update(layer: _BatchNorm, found: _Statistics) -> None:
    """Makes the update that the layer makes itself in a forward pass."""
    momentum = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
    variance = found.squares / max(found.count - 1, 1)
    for buffer, new in ((layer.running_mean, found.mean), (layer.running_var, variance)):
        if buffer is not None:
            old = buffer.double()
            buffer.copy_(old + (new - old) * (momentum or 0.0))
