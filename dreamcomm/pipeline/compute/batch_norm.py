"""Gives batch norm in a pipeline the running statistics of the whole batch.

Each micro-batch is normalised by its own statistics. Plain layers would also update the running
ones once for each micro-batch, in an order that the schedule decides. Here the statistics of the
micro-batches are collected and the update is made once for each step, as with the whole batch
(Kim et al., "torchgpipe", 2020, section 3.2: deferred batch normalization).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["DeferredBatchNorm"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


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
class _Call:
    """A call of a layer that is running: what to put back afterwards, and what it writes to."""

    buffers: dict[str, Tensor | None]
    momentum: float | None
    scratch: dict[str, Tensor]


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

    While a layer runs it is given new buffers and a momentum of one, so that it writes the
    micro-batch's statistics there itself; then it gets its own back. Layers are looked at when
    they are called: those in evaluation mode or without running statistics run as they are.
    ``SyncBatchNorm`` is left alone, torch's and others of that name, and so is ``InstanceNorm``.
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
        self._layers = [part for part in dict.fromkeys(parts) if _is_deferrable(part)]
        self._collected: dict[_BatchNorm, _Collected] = {}
        self._running: dict[_BatchNorm, _Call] = {}
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
        handles = []
        try:
            for layer in self._layers:
                handles.append(layer.register_forward_pre_hook(self._before))
                handles.append(layer.register_forward_hook(self._after, always_call=True))
            yield
        except BaseException:
            self.discard()
            raise
        finally:
            self._in_step = False
            for handle in handles:
                handle.remove()
            for layer in list(self._running):
                self._put_back(layer)

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

    def _before(self, layer: nn.Module, _: Any) -> None:
        assert isinstance(layer, _BatchNorm)
        self._put_back(layer)
        if not (layer.training and layer.track_running_stats) or layer.running_mean is None:
            return
        buffers = {name: layer._buffers.get(name) for name in _BUFFERS}
        scratch = {name: torch.zeros_like(b) for name, b in buffers.items() if b is not None}
        self._running[layer] = _Call(buffers, layer.momentum, scratch)
        layer._buffers.update(scratch)
        layer.momentum = 1.0

    def _after(self, layer: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        assert isinstance(layer, _BatchNorm)
        call = self._put_back(layer)
        if call is None or self._microbatch is None or not isinstance(output, Tensor):
            return
        count = output.numel() // output.shape[1]
        mean, variance = (call.scratch[name].double() for name in _BUFFERS[:2])
        found = _Statistics(count, mean, variance * (count - 1))
        collected = self._collected.setdefault(layer, _Collected())
        collected.by_microbatch.setdefault(self._microbatch, []).append(found)

    def _put_back(self, layer: _BatchNorm) -> _Call | None:
        call = self._running.pop(layer, None)
        if call is not None:
            layer._buffers.update(call.buffers)
            layer.momentum = call.momentum
        return call


def _is_deferrable(module: nn.Module) -> bool:
    """Says if this is batch norm over this rank's rows. Subclasses of other names count."""
    names = {base.__name__ for base in type(module).__mro__}
    return isinstance(module, _BatchNorm) and "SyncBatchNorm" not in names


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
