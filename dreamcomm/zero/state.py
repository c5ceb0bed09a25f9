"""The optimizer's state, as torch's optimizers and checkpoints have it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from dreamcomm.zero.engine import WHAT
from dreamcomm.zero.shards import ParameterShard

if TYPE_CHECKING:
    from dreamcomm.zero.optimizer import ZeroOptimizer

__all__ = ["State", "load_state", "packed_state"]

MASTER = "master_param"  # the key of the copy of more bits


class State(MutableMapping[Tensor, dict[str, Any]]):
    """What an inner optimizer keeps of each parameter's rows, by the parameters.

    It counts as true while it is empty: torch's ``get_optimizer_state_dict`` makes steps of an
    optimizer without a state.
    """

    def __init__(self, shards: Mapping[int, ParameterShard], inner: Optimizer) -> None:
        self._shards, self._inner = shards, inner

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return self._inner.state[self._shards[id(parameter)].tensor]

    def __setitem__(self, parameter: Tensor, value: dict[str, Any]) -> None:
        self._inner.state[self._shards[id(parameter)].tensor] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._inner.state[self._shards[id(parameter)].tensor]

    def __iter__(self) -> Iterator[Tensor]:
        kept = self._inner.state
        return (one.parameter for one in self._shards.values() if one.tensor in kept)

    def __len__(self) -> int:
        return len(self._inner.state)

    def __bool__(self) -> bool:
        return True


def packed_state(optimizer: ZeroOptimizer, *, as_shards: bool = False) -> dict[str, Any]:
    """The state by numbers of parameters; ``as_shards``: this rank's rows as plain tensors."""
    numbers: dict[int, int] = {}
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers[id(parameter)] = len(numbers)
        packed = {key: value for key, value in group.items() if key != "params"}
        groups.append({**packed, "params": [numbers[id(one)] for one in group["params"]]})
    mesh = None if as_shards else _mesh(optimizer)
    state = {}
    for one in optimizer._shards.values():
        if not one.parameter.requires_grad:
            continue
        kept = optimizer._inner.state.get(one.tensor) or _blank(optimizer._inner, one)
        if one.has_master:
            kept = {**kept, MASTER: one.tensor}
        state[numbers[id(one.parameter)]] = {
            key: _whole(one, value, mesh) for key, value in kept.items()
        }
    return {"state": state, "param_groups": groups}


def _mesh(optimizer: ZeroOptimizer) -> DeviceMesh:
    device = optimizer.param_groups[0]["params"][0].device.type
    return DeviceMesh.from_group(optimizer.process_group, device)


def _whole(one: ParameterShard, value: Any, mesh: DeviceMesh | None) -> Any:
    if mesh is None or not _is_rows(one, value):
        return value
    whole = one.parameter
    return DTensor.from_local(
        value.contiguous(),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
    )


def _is_rows(one: ParameterShard, value: Any) -> bool:
    """Whether it holds a number for each of this rank's elements."""
    is_tensor = isinstance(value, Tensor) and value.dim() > 0
    return is_tensor and not one.replicated and value.shape == one.tensor.shape


def _blank(inner: Optimizer, one: ParameterShard) -> dict[str, Any]:
    """The state as it is before a first step, found by a step of another optimizer."""
    group = next(g for g in inner.param_groups if any(p is one.tensor for p in g["params"]))
    options = {key: value for key, value in group.items() if key != "params"}
    other = torch.zeros_like(one.tensor)
    other.grad = torch.zeros_like(other)
    scratch = type(inner)([{**options, "lr": 0.0, "params": [other]}])
    scratch.step()
    blank = dict(scratch.state[other])
    if isinstance(blank.get("step"), Tensor):
        blank["step"].zero_()
    return blank


def load_state(optimizer: ZeroOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Takes a state: all of it is checked and copied before anything changes.

    Raises:
        ValueError: it is of other parameters, or lacks a part.
    """
    saved_groups = state_dict["param_groups"]
    _check_groups(optimizer, saved_groups)
    by_number = {
        number: optimizer._shards[id(parameter)]
        for saved, group in zip(saved_groups, optimizer.param_groups, strict=True)
        for number, parameter in zip(saved["params"], group["params"], strict=True)
    }
    taken: dict[Tensor, dict[str, Any]] = {}
    masters: list[tuple[ParameterShard, Tensor]] = []
    for number, kept in state_dict["state"].items():
        one = by_number.get(number)
        if one is None:
            raise ValueError(
                f"{WHAT}: the state to load has a parameter {number!r} that no group has"
            )
        mine = {key: _rows_of(one, key, value, optimizer) for key, value in kept.items()}
        if one.has_master:
            rows = one.rows(one.parameter.detach())
            masters.append((one, mine.pop(MASTER, rows)))
        mine.pop(MASTER, None)
        _check_parts(optimizer, one, mine)
        if mine:
            taken[one.tensor] = mine
    _warn_of_missing(by_number, state_dict["state"])
    for one, values in masters:
        one.tensor.copy_(values)
    optimizer._inner.state.clear()
    optimizer._inner.state.update(taken)
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=True):
        group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
    optimizer._kernel_step.forget()


def _check_groups(optimizer: ZeroOptimizer, saved: list[dict[str, Any]]) -> None:
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved]
    if ours != theirs:
        raise ValueError(
            f"{WHAT}: the state to load has groups of {theirs} parameters, and the optimizer has "
            f"groups of {ours}: it is of another model"
        )


def _rows_of(one: ParameterShard, key: str, value: Any, optimizer: ZeroOptimizer) -> Any:
    """This rank's part of a saved value, as a copy."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" or value.dim() == 0:
        return value.detach().clone()
    whole = one.parameter.shape
    if isinstance(value, DTensor):
        if value.shape != whole:
            raise _of_another(one, key, value)
        local = value.to_local()
        world = dist.get_world_size(optimizer.process_group)
        same = tuple(value.placements) == (Shard(0),) and value.device_mesh.size() == world
        if same and local.shape == one.tensor.shape:
            return torch.empty_like(one.tensor).copy_(local)
        value = value.full_tensor()
    if value.shape == whole:
        return torch.empty_like(one.tensor).copy_(one.rows(value))
    if value.shape == one.tensor.shape:
        return torch.empty_like(one.tensor).copy_(value)
    raise _of_another(one, key, value)


def _of_another(one: ParameterShard, key: str, value: Tensor) -> ValueError:
    return ValueError(
        f"{WHAT}: {key!r} of parameter {one.name!r} has shape {tuple(value.shape)} in the state to "
        f"load, and the parameter has {tuple(one.parameter.shape)}: it is of another model. "
        "Nothing was changed"
    )


def _check_parts(optimizer: ZeroOptimizer, one: ParameterShard, mine: dict[str, Any]) -> None:
    expected = set(_blank(optimizer._inner, one)) if one.parameter.requires_grad else set()
    lacking = sorted(expected - set(mine))
    if mine and lacking:
        raise ValueError(
            f"{WHAT}: the state to load lacks {', '.join(map(repr, lacking))} of parameter "
            f"{one.name!r}; it has {sorted(mine)}. Nothing was changed"
        )


def _warn_of_missing(by_number: Mapping[int, ParameterShard], state: Mapping[Any, Any]) -> None:
    without = [
        one.name
        for number, one in by_number.items()
        if one.parameter.requires_grad and number not in state
    ]
    if state and without:
        warnings.warn(
            f"{WHAT}: the state to load has nothing of {len(without)} parameters "
            f"({', '.join(without[:3])}{', ...' if len(without) > 3 else ''}), as if they had never "
            "been stepped; they begin anew",
            stacklevel=4,
        )
