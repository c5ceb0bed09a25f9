"""Puts SyncBatchNorm in the place of batch norm layers, and takes it out again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dreamcomm.sync_batch_norm.layer import SyncBatchNorm

__all__ = ["convert_sync_batchnorm", "name_layers", "revert_sync_batchnorm", "sync_layers"]

SYNC = (SyncBatchNorm, nn.SyncBatchNorm)


def convert_sync_batchnorm(
    module: nn.Module, process_group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Replaces all batch norm layers of a module by :class:`SyncBatchNorm`, as torch's function.

    torch's SyncBatchNorm is replaced, too. A layer in several places is replaced by one. The new
    layers have the old ones' parameters, buffers, mode and hooks; on CUDA devices they are of
    torch's class. Nothing is communicated.

    Args:
        module: it gets new layers in their places.
        process_group: of the new layers; None: all ranks.

    Returns:
        The module, or the new layer if it is a batch norm layer itself.

    Raises:
        TypeError: a layer's forward is its own, or its parameters are lazy, parametrized or
            sharded. Nothing is replaced then.
    """

    def synchronised(layer: _BatchNorm) -> _BatchNorm:
        on_cuda = any(one.is_cuda for one in [*layer.parameters(), *layer.buffers()])
        kind = nn.SyncBatchNorm if on_cuda else SyncBatchNorm
        made = _of_class(layer, kind)
        made.__dict__["process_group"] = process_group
        if isinstance(made, SyncBatchNorm):
            if not isinstance(layer, SyncBatchNorm):
                made._set_apart()
            made._calls = None
        if not isinstance(layer, SYNC):
            made.__dict__["_before_sync"] = type(layer)
        return made

    converted = _replaced(module, _BatchNorm, "convert_sync_batchnorm", synchronised)
    name_layers(converted)
    return converted


def revert_sync_batchnorm(
    module: nn.Module, layer_class: type[_BatchNorm] | None = None
) -> nn.Module:
    """Replaces SyncBatchNorm layers, this library's and torch's, by the layers they were before.

    Args:
        module: it gets new layers in their places.
        layer_class: of layers that were made as SyncBatchNorm, such as ``nn.BatchNorm2d``.

    Returns:
        The module, or the new layer if it is a SyncBatchNorm layer itself.

    Raises:
        TypeError: a layer was made as SyncBatchNorm, and ``layer_class`` is not given. Nothing is
            replaced then.
    """

    def plain(layer: _BatchNorm) -> _BatchNorm:
        kind = getattr(layer, "_before_sync", layer_class)
        if kind is None:
            raise TypeError(
                "revert_sync_batchnorm: a layer was made as SyncBatchNorm: give the class that it "
                "gets, as layer_class=nn.BatchNorm2d"
            )
        made = _of_class(layer, kind)
        for name in ("process_group", "name", "recorder", "rows", "_calls", "_before_sync"):
            made.__dict__.pop(name, None)
        return made

    return _replaced(module, SYNC, "revert_sync_batchnorm", plain)


def sync_layers(module: nn.Module) -> dict[str, SyncBatchNorm]:
    """This library's layers in a module, by name."""
    found = module.named_modules()
    return {name: one for name, one in found if isinstance(one, SyncBatchNorm)}


def name_layers(module: nn.Module) -> None:
    """Gives the module's layers without a name the one that they have in it."""
    for name, layer in sync_layers(module).items():
        if name and not layer.name:
            layer.set_name(name)


def _of_class(layer: _BatchNorm, kind: type[_BatchNorm]) -> _BatchNorm:
    """Another layer with the same parameters, buffers, hooks and settings."""
    made = kind.__new__(kind)
    for name, value in layer.__dict__.items():
        made.__dict__[name] = copy.copy(value) if isinstance(value, dict) else value
    return made


def _replaced(
    module: nn.Module,
    kinds: type[_BatchNorm] | tuple[type[_BatchNorm], ...],
    what: str,
    make: Callable[[_BatchNorm], _BatchNorm],
) -> nn.Module:
    new: dict[int, nn.Module] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, kinds):
            _check(layer, name, what)
            new[id(layer)] = make(layer)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in new:
                parent._modules[name] = new[id(child)]
    return new.get(id(module), module)


def _check(layer: _BatchNorm, name: str, what: str) -> None:
    kind = type(layer)
    own = kind.forward not in (_BatchNorm.forward, *(one.forward for one in SYNC))
    reason = (
        "has a forward of its own, which would be lost"
        if own
        else "has lazy parameters: run a batch through the module before"
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin)
        else "is sharded already: convert before fully_shard"
        if any(hasattr(one, "device_mesh") for one in layer.parameters())
        else "has parametrized parameters"
        if hasattr(layer, "parametrizations")
        else ""
    )
    if reason:
        raise TypeError(f"{what}: layer {name!r} ({kind.__name__}) {reason}")
