"""What a rank without data does while others train on: the same collectives, with zeros."""

from __future__ import annotations

from typing import Protocol

from torch import nn
from torch.distributed.algorithms.join import JoinHook

from dreamcomm.ddp.engine import Reducer
from dreamcomm.ddp.logger import Logger
from dreamcomm.ddp.sync_layers import SyncLayers

__all__ = ["ReducerJoinHook"]


class Joined(Protocol):
    """What a join uses of a DistributedDataParallel."""

    logger: Logger
    reducer: Reducer
    module: nn.Module
    sync_layers: SyncLayers
    require_forward_param_sync: bool
    _divide_by_initial_world_size: bool

    def _check_and_sync_module_buffers(self) -> None: ...
    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool: ...
    def _sync_final_model(self, is_last_joiner: bool) -> None: ...


class ReducerJoinHook(JoinHook):
    """Shadows the forward and backward passes of the ranks that have data.

    Args:
        model: the wrapped module.
        divide_by_initial_world_size: averages count all ranks; else those that have data.
    """

    def __init__(self, model: Joined, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        model.logger._set_uneven_input_join()
        model._divide_by_initial_world_size = divide_by_initial_world_size
        self.model = model

    def main_hook(self) -> None:
        """Takes part in one step of the others."""
        model = self.model
        model._check_and_sync_module_buffers()
        syncs = bool(model._check_global_requires_backward_grad_sync(is_joined_rank=True))
        model.require_forward_param_sync = syncs
        # The others launch their buckets without waiting, so these calls come first on all ranks.
        model.sync_layers.replay(model.module)
        if syncs:
            model.reducer.reduce_zeros(divides_by_active=not model._divide_by_initial_world_size)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Takes the parameters of a rank that trained to the end."""
        self.model._sync_final_model(is_last_joiner)
