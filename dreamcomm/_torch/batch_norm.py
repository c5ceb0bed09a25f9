"""Lets batch norm layers write each batch's statistics beside the running ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dreamcomm._torch.ddp import unseen_by_dynamo

__all__ = [
    "STATISTICS",
    "BatchStatistics",
    "batch_statistics",
    "is_batch_norm",
    "is_sync_batch_norm",
]

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_sync_batch_norm(module: nn.Module) -> bool:
    """True for torch's ``SyncBatchNorm``, and for others of that name."""
    return "SyncBatchNorm" in {base.__name__ for base in type(module).__mro__}


def is_batch_norm(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """True for batch norm over this rank's rows. Subclasses of other names count."""
    return isinstance(module, _BatchNorm) and not is_sync_batch_norm(module)


class BatchStatistics(NamedTuple):
    """What one call of a layer found.

    Attributes:
        mean: of each channel.
        variance: of each channel; the sum of squares is divided by the number of rows less one.
        output: of the layer.
    """

    mean: Tensor
    variance: Tensor
    output: Tensor


@dataclass
class _Call:
    """A call of a layer that is running: what to put back afterwards, and what it writes to."""

    buffers: dict[str, Tensor | None]
    momentum: float | None
    scratch: dict[str, Tensor]


@contextmanager
def batch_statistics(
    layers: Iterable[_BatchNorm], found: Callable[[_BatchNorm, BatchStatistics], None]
) -> Iterator[None]:
    """Keeps the running statistics of layers as they are, and collects those of their batches.

    While a layer runs it is given new buffers and a momentum of one, so that it writes the
    batch's statistics there itself; then it gets its own back. Layers are looked at when
    they are called: those in evaluation mode or without running statistics run as they are.
    Outside of the context nothing on the layers is changed.

    Args:
        layers: get hooks within the context.
        found: is called after each call of a layer that returned a tensor.
    """
    hooks, handles = _Hooks(found), []
    try:
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(hooks.before))
            handles.append(layer.register_forward_hook(hooks.after, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        hooks.put_all_back()


class _Hooks:
    def __init__(self, found: Callable[[_BatchNorm, BatchStatistics], None]) -> None:
        self._found = found
        self._running: dict[_BatchNorm, _Call] = {}

    def put_all_back(self) -> None:
        for layer in list(self._running):
            self._put_back(layer)

    @unseen_by_dynamo
    def before(self, layer: nn.Module, _: Any) -> None:
        assert isinstance(layer, _BatchNorm)
        self._put_back(layer)
        if not (layer.training and layer.track_running_stats) or layer.running_mean is None:
            return
        buffers = {name: layer._buffers.get(name) for name in STATISTICS}
        scratch = {name: torch.zeros_like(b) for name, b in buffers.items() if b is not None}
        self._running[layer] = _Call(buffers, layer.momentum, scratch)
        layer._buffers.update(scratch)
        layer.momentum = 1.0

    @unseen_by_dynamo
    def after(self, layer: nn.Module, _: Sequence[Any], output: Any) -> None:
        assert isinstance(layer, _BatchNorm)
        call = self._put_back(layer)
        if call is not None and isinstance(output, Tensor):
            mean, variance = (call.scratch[name] for name in STATISTICS[:2])
            self._found(layer, BatchStatistics(mean, variance, output))

    def _put_back(self, layer: _BatchNorm) -> _Call | None:
        call = self._running.pop(layer, None)
        if call is not None:
            layer._buffers.update(call.buffers)
            layer.momentum = call.momentum
        return call
