"""Loads an optimizer's state from whole tensors, or from DTensors of any layout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dreamcomm.zero.engine import WHAT
from dreamcomm.zero.initial import initial_state, options_of, state_parts
from dreamcomm.zero.rows import check_part, rows_of
from dreamcomm.zero.shards import ParameterShard, ShardedGroups
from dreamcomm.zero.state import MASTER

__all__ = ["load_state"]

UNCHANGED = "nothing has changed"


@dataclass(frozen=True)
class _Entry:
    """What is loaded for one parameter.

    Attributes:
        shard: this rank's rows.
        options: of its group, as they are after the load.
        parts: the keys of a state, and whether each has a number for every element.
        kept: the saved state; empty where there is none.
    """

    shard: ParameterShard
    options: Mapping[str, Any]
    parts: Mapping[str, bool]
    kept: Mapping[str, Any]


def load_state(sharded: ShardedGroups, state_dict: Mapping[str, Any]) -> None:
    """Takes a state: all of it is checked and copied before anything changes.

    A parameter without an entry, or with an empty one, is as if it had never been stepped. Where
    the state has no copies of more bits, they are read from the parameters before the next step.

    Raises:
        ValueError: it is of other parameters, or lacks a part, or has that of another rank.
    """
    groups = _checked_groups(sharded, state_dict)
    entries = _entries(sharded, state_dict, groups)
    for entry in entries:
        _check_entry(entry)
    _warn_of_missing(entries)
    ranks = dist.get_process_group_ranks(sharded.process_group)
    taken = [
        {key: _taken(entry, key, value, ranks) for key, value in entry.kept.items()}
        for entry in entries
    ]
    options = [
        _options_like(group, saved) for saved, group in zip(groups, sharded.groups, strict=True)
    ]
    state = sharded.inner.state
    state.clear()
    for entry, values in zip(entries, taken, strict=True):
        one, master = entry.shard, values.pop(MASTER, None)
        if one.has_master and master is not None:
            one.tensor.copy_(master)
        if not values and isinstance(sharded.inner, torch.optim.Adagrad):
            values = initial_state(sharded.inner, entry.options, one.tensor)  # it makes it early
        if values:
            state[one.tensor] = values
    for group, loaded in zip(sharded.groups, options, strict=True):
        group.update(loaded)


def _options_like(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of saved options. torch's unflattening makes lists of pairs such as betas."""
    options = deepcopy(options_of(saved))
    for key, value in options.items():
        if isinstance(value, list) and isinstance(group.get(key), tuple):
            options[key] = tuple(value)
    return options


def _checked_groups(
    sharded: ShardedGroups, state_dict: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"{WHAT}: expected a state with 'state' and 'param_groups', got keys "
                f"{sorted(map(str, state_dict))[:5]}; {UNCHANGED}"
            )
    groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
    ours = [len(group["params"]) for group in sharded.groups]
    theirs = [len(group["params"]) for group in groups]
    if ours != theirs:
        raise ValueError(
            f"{WHAT}: expected a state of {_sizes(ours)}, got one of {_sizes(theirs)}: it is of "
            f"another model; {UNCHANGED}"
        )
    return groups


def _sizes(groups: Sequence[int]) -> str:
    counts = " and ".join(map(str, groups)) or "no"
    return f"{len(groups)} group{'s' * (len(groups) != 1)} with {counts} parameters"


def _entries(
    sharded: ShardedGroups,
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> list[_Entry]:
    """One for each parameter, in the order of the groups."""
    state = dict(state_dict["state"])
    like = next(iter(sharded.shards.values())).tensor
    found = []
    for saved, group in zip(groups, sharded.groups, strict=True):
        options = {**options_of(group), **options_of(saved)}
        parts = state_parts(sharded.inner, options, like)
        for key, parameter in zip(saved["params"], group["params"], strict=True):
            kept = state.pop(key, {})
            # torch's unflattening has an empty dict where a checkpoint had no value.
            present = {part: value for part, value in kept.items() if not _is_absent(value)}
            found.append(_Entry(sharded.shards[id(parameter)], options, parts, present))
    if state:
        raise ValueError(
            f"{WHAT}: the state has entries of parameters that are in none of its groups: "
            f"{', '.join(map(repr, list(state)[:3]))}; {UNCHANGED}"
        )
    return found


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and not value)


def _check_entry(entry: _Entry) -> None:
    """Raises where a parameter's state lacks a part, or has one of another shape or rank."""
    one, parts = entry.shard, entry.parts
    if not entry.kept:
        return
    if set(entry.kept) != {MASTER}:  # that alone: of an optimizer without other state
        lacking = [part for part in parts if part not in entry.kept]
        if lacking:
            raise ValueError(
                f"{WHAT}: expected {_listed(parts)} of parameter {one.name!r} in the state, got "
                f"{_listed(entry.kept)}: it lacks {_listed(lacking)}; {UNCHANGED}"
            )
    for part, value in entry.kept.items():
        if isinstance(value, DTensor):
            check_part(one, part, value)
        every = part == MASTER or parts.get(part, False)
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if every and shape is None:
            raise ValueError(
                f"{WHAT}: expected a tensor as {part!r} of parameter {one.name!r} in the state, "
                f"got {type(value).__name__}; {UNCHANGED}"
            )
        if every and shape != tuple(one.parameter.shape):
            raise ValueError(
                f"{WHAT}: expected shape {tuple(one.parameter.shape)} of {part!r} of parameter "
                f"{one.name!r} in the state, got {shape}: it is of another model; {UNCHANGED}"
            )


def _listed(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def _taken(entry: _Entry, key: str, value: Any, ranks: list[int]) -> Any:
    """This rank's part of a saved value, as a copy."""
    one = entry.shard
    if not isinstance(value, Tensor):
        return deepcopy(value)
    if value.dim() == 0 or value.shape != one.parameter.shape:
        return _number(entry, key, value)
    return rows_of(one, value, ranks)


def _number(entry: _Entry, key: str, value: Tensor) -> Tensor:
    """A value that is not of the parameter's shape, cast as torch's optimizers do."""
    like = entry.shard.tensor
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if key == "step":
        on_device = entry.options.get("capturable") or entry.options.get("fused")
        device, dtype = (like.device, torch.float32) if on_device else (whole.device, whole.dtype)
    else:
        device = like.device
        dtype = like.dtype if whole.is_floating_point() else whole.dtype
    return whole.detach().to(device=device, dtype=dtype, copy=True)


def _warn_of_missing(entries: Sequence[_Entry]) -> None:
    trained = [one for one in entries if one.shard.parameter.requires_grad and one.parts]
    without = [entry.shard.name for entry in trained if not entry.kept]
    if 0 < len(without) < len(trained):
        warnings.warn(
            f"{WHAT}: the state to load has nothing of {len(without)} parameters "
            f"({', '.join(without[:3])}{', ...' if len(without) > 3 else ''}), as if they had "
            "never been stepped; they begin anew",
            stacklevel=4,
        )
