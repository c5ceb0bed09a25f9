"""SyncBatchNorm layers of a wrapped module: their names, and their calls under join()."""

from __future__ import annotations

import torch
from torch import nn

from dreamcomm.sync_batch_norm.calls import Kind
from dreamcomm.sync_batch_norm.convert import name_layers, sync_layers
from dreamcomm.sync_batch_norm.replay import Recorder

__all__ = ["SyncLayers"]


class SyncLayers:
    """Notes the calls of each step under join(), for the time when this rank has no data.

    Args:
        module: the wrapped one; its layers get their names in it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._recorder: Recorder | None = None
        name_layers(module)

    def begin_step(self, module: nn.Module, *, joins: bool) -> None:
        """A forward pass begins: its calls, and those of its backward pass, are this step's.

        Raises:
            RuntimeError: it is no training step under join().
        """
        if not joins and self._recorder is None:
            return
        layers = sync_layers(module)
        if joins and layers and not (module.training and torch.is_grad_enabled()):
            raise RuntimeError(
                f"under join() a rank without data repeats the calls of {next(iter(layers))!r} and "
                "other SyncBatchNorm layers in training: evaluate without the wrapper, as "
                "model.module(...), or after join()"
            )
        self._recorder = Recorder() if joins else None
        for layer in layers.values():
            layer.recorder = self._recorder

    def replay(self, module: nn.Module) -> None:
        """Makes the calls of the latest step without rows. Collective with the others' step.

        Raises:
            RuntimeError: the others make other calls, or this rank has run no step: on all ranks.
        """
        if self._recorder is not None:
            self._recorder.replay()
            return
        first = next((one for one in sync_layers(module).values() if one.training), None)
        if first is not None:
            first.calls().gather(Kind.NO_STEP, 0)
