"""What an optimizer keeps of a parameter that it has not stepped yet."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dreamcomm.zero.per_element import PER_ELEMENT

__all__ = ["initial_state", "options_of", "state_parts"]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def initial_state(inner: Optimizer, options: Mapping[str, Any], tensor: Tensor) -> dict[str, Any]:
    """The state with which a first step begins, in new tensors.

    The inner optimizer and the tensor stay as they are. SGD begins without a momentum. It gets
    zeros here, as from torch's ``get_optimizer_state_dict``.
    """
    if isinstance(inner, torch.optim.SGD):
        return {"momentum_buffer": torch.zeros_like(tensor)} if options["momentum"] != 0 else {}
    other = torch.zeros_like(tensor)
    other.grad = torch.zeros_like(other)
    group = {**options, "params": [other]}
    if type(inner) in PER_ELEMENT:
        scratch = type(inner)([group])  # type: ignore[call-arg]
        if not scratch.state:
            begin: Any = scratch._init_group  # type: ignore[attr-defined]
            lists = len(inspect.signature(begin).parameters) - 1
            begin(scratch.param_groups[0], *([] for _ in range(lists)))
        return dict(scratch.state[other])
    scratch = object.__new__(type(inner))
    scratch.__dict__.update(inner.__dict__)
    scratch.param_groups, scratch.state = [group], defaultdict(dict)
    scratch.step()
    found = dict(scratch.state[other])
    if isinstance(found.get("step"), Tensor):
        found["step"].zero_()
    return found


def state_parts(inner: Optimizer, options: Mapping[str, Any], like: Tensor) -> dict[str, bool]:
    """The keys of a parameter's state, and whether each has a number for every element."""
    small = torch.zeros(1, dtype=like.dtype, device=like.device)
    found = initial_state(inner, options, small)
    return {key: isinstance(value, Tensor) and value.dim() > 0 for key, value in found.items()}
