"""The optimizer's state, as torch's optimizers and checkpoints have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from dreamcomm.zero.initial import initial_state, options_of
from dreamcomm.zero.shards import ParameterShard, ShardedGroups, refresh_masters

__all__ = ["MASTER", "RowsState", "WholeState", "packed_state", "whole_state"]

MASTER = "master_param"  # the key of the copy of more bits


class RowsState(MutableMapping[Tensor, Mapping[str, Any]]):
    """What an inner optimizer keeps of each parameter's rows, by the parameters.

    A parameter that was not stepped yet shows the state with which its first step begins, read
    only. Reading changes nothing. The mapping counts as true while it is empty: torch's
    ``get_optimizer_state_dict`` makes steps of an optimizer without a state.
    """

    def __init__(self, shards: Mapping[int, ParameterShard], inner: Optimizer) -> None:
        self._shards, self._inner = shards, inner

    def __getitem__(self, parameter: Tensor) -> Mapping[str, Any]:
        one = self._shards[id(parameter)]
        if not one.has_master and self._inner.state.get(one.tensor):
            kept: dict[str, Any] = self._inner.state[one.tensor]
            return kept
        return MappingProxyType(_kept_or_initial(self._inner, one, _options(self._inner)))

    def __setitem__(self, parameter: Tensor, value: Mapping[str, Any]) -> None:
        kept = {key: part for key, part in value.items() if key != MASTER}
        self._inner.state[self._shards[id(parameter)].tensor] = kept

    def __contains__(self, parameter: object) -> bool:
        one = self._shards.get(id(parameter))
        return one is not None and one.tensor in self._inner.state

    def pop(self, parameter: Tensor, *default: Any) -> Any:
        """As of a dict: a state that a first step has not made yet is not there."""
        if default and parameter not in self:
            return default[0]
        return super().pop(parameter)

    def replace(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Takes another mapping's entries in place of all own ones.

        Raises:
            ValueError: it has a parameter that the optimizer does not have. Nothing has changed.
        """
        if state is self:
            return
        others = sum(id(parameter) not in self._shards for parameter in state)
        if others:
            raise ValueError(
                f"ZeroOptimizer: the new state has {others} parameters that the optimizer does not "
                "have; nothing has changed"
            )
        entries = list(state.items())
        self._inner.state.clear()
        for parameter, kept in entries:
            self[parameter] = kept

    def __delitem__(self, parameter: Tensor) -> None:
        del self._inner.state[self._shards[id(parameter)].tensor]

    def __iter__(self) -> Iterator[Tensor]:
        kept = self._inner.state
        return (one.parameter for one in self._shards.values() if one.tensor in kept)

    def __len__(self) -> int:
        return len(self._inner.state)

    def __bool__(self) -> bool:
        return True


def packed_state(sharded: ShardedGroups) -> dict[str, Any]:
    """The state by numbers of parameters.

    It has the parameters that torch's ``get_optimizer_state_dict`` has before a first step: all
    that require a gradient, used or not. So a checkpoint has the keys that a new optimizer's
    strict load expects. A frozen parameter is there if it was stepped before.
    """
    numbers: dict[int, int] = {}
    groups = []
    for group in sharded.groups:
        for parameter in group["params"]:
            numbers[id(parameter)] = len(numbers)
        packed = {key: value for key, value in group.items() if key != "params"}
        groups.append({**packed, "params": [numbers[id(one)] for one in group["params"]]})
    inner = sharded.inner
    mesh = _mesh_of(sharded)
    options = _options(inner)
    shards = [
        one
        for one in sharded.shards.values()
        if one.parameter.requires_grad or inner.state.get(one.tensor)
    ]
    refresh_masters(shards)
    state = {}
    for one in shards:
        kept = _kept_or_initial(inner, one, options)
        if not inner.state.get(one.tensor):
            kept = {key: _as_kept(one, value) for key, value in kept.items()}
        state[numbers[id(one.parameter)]] = {
            key: _whole(one, value, mesh) for key, value in kept.items()
        }
    # An optimizer without any state, such as SGD without momentum, has no entries in torch.
    return {"state": state if any(state.values()) else {}, "param_groups": groups}


def _mesh_of(sharded: ShardedGroups) -> DeviceMesh:
    """The parameters' own, which is there when the group is destroyed, or one of the group."""
    one = next(iter(sharded.shards.values())).parameter
    if isinstance(one, DTensor):
        return one.device_mesh
    return DeviceMesh.from_group(sharded.process_group, sharded.device.type)


@dataclass(frozen=True)
class WholeState:
    """The state of all ranks' rows.

    Attributes:
        to: the rank of the group that has it.
        kept: by numbers of parameters, in tensors on the CPU; None on the other ranks.
    """

    to: int
    kept: dict[int, dict[str, Any]] | None

    def entries(self, rank: int) -> dict[int, dict[str, Any]]:
        """The entries of a state_dict.

        Raises:
            RuntimeError: another rank has them.
        """
        if self.kept is None:
            raise RuntimeError(
                f"rank {rank}: ZeroOptimizer.state_dict(): the state was consolidated on rank "
                f"{self.to} of the group, and is whole there alone: call state_dict() on that "
                "rank, or after the next step"
            )
        return {number: dict(parts) for number, parts in self.kept.items()}


def whole_state(sharded: ShardedGroups, to: int, *, keep: bool) -> WholeState:
    """Gathers the state. Collective.

    Args:
        keep: on the rank ``to``.
    """
    found = {}
    for number, kept in packed_state(sharded)["state"].items():
        found[number] = {key: _gathered(value, keep=keep) for key, value in kept.items()}
    return WholeState(to, found if keep else None)


def _gathered(value: Any, *, keep: bool) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value)
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().to("cpu", copy=True) if keep else None


def _options(inner: Optimizer) -> dict[int, dict[str, Any]]:
    """Each tensor's options, by its id."""
    found = {}
    for group in inner.param_groups:
        options = options_of(group)
        found.update({id(tensor): options for tensor in group["params"]})
    return found


def _kept_or_initial(
    inner: Optimizer, one: ParameterShard, options: Mapping[int, dict[str, Any]]
) -> dict[str, Any]:
    kept = inner.state.get(one.tensor)
    if not kept:
        kept = initial_state(inner, options[id(one.tensor)], one.tensor)
    return {**kept, MASTER: one.tensor} if one.has_master else dict(kept)


def _as_kept(one: ParameterShard, value: Any) -> Any:
    """A value of a new state, in the memory that the state is kept in."""
    is_part = isinstance(value, Tensor) and value.shape == one.tensor.shape
    return one.state_of(value) if is_part and not one.holds_state(value) else value


def _whole(one: ParameterShard, value: Any, mesh: DeviceMesh) -> Any:
    """A value as a checkpoint has it: rows as a part of a tensor over all ranks."""
    if not isinstance(value, Tensor) or one.replicated or value.shape != one.tensor.shape:
        return value
    shape = one.parameter.shape
    stride = torch.empty(shape, device="meta").stride()
    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
    return DTensor.from_local(
        value.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
    )
