"""What torch's pipelines ask of the state of a module under fully_shard, and no more.

``torch.distributed.pipelining`` holds gradients back for all micro-batches, and then calls
``fully_shard.state(module)``'s groups and final callback, which reduce.
"""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, cast

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from dreamcomm.zero.units.unit import Unit

__all__ = ["UnitState", "give_state"]


class UnitState:
    """Stands in for torch's FSDPState of a module."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def _fsdp_param_groups(self) -> list[Any]:
        return [self]  # made anew: kept, it would keep the parameters until a garbage collection

    @property
    def _state_ctx(self) -> Any:
        return SimpleNamespace(all_states=[self])

    def post_backward(self) -> None:
        """Does nothing: the final callback reduces all units together."""

    def _root_post_backward_final_callback(self) -> None:
        self._unit.tree.reduce_gradients()

    # What torch's register_fsdp_forward_method calls.

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._unit.before_forward(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._unit.after_forward(module, args, output)


def give_state(module: nn.Module, unit: Unit) -> None:
    """Has torch's ``fully_shard.state(module)`` give the stand-in, and torch refuse to wrap it."""
    key = cast(Any, torchs_fully_shard).__wrapped__
    state = UnitState(unit)
    module.__dict__.setdefault(STATE_KEY, OrderedDict())[key] = state
    registry = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
    registry["fully_shard"] = RegistryItem()
