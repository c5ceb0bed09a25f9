"""The parameters that several ranks train, as users give them, and what is equal about them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.ranks.agree import first_difference, gather_objects

__all__ = [
    "TrainedParameter",
    "check_equal_buffers",
    "check_equal_models",
    "check_group",
    "described",
    "find_parameters",
    "groups_of",
    "named_parameters",
    "stepped",
]


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that ranks train.

    Attributes:
        name: for messages.
        parameter: itself.
        sparse: whether its gradient is.
        factor: of the ranks' sum; 0: that of what reduces it.
        grad_dtype: of its gradient; None: its own.
    """

    name: str
    parameter: nn.Parameter
    sparse: bool = False
    factor: float = 0.0
    grad_dtype: torch.dtype | None = None


# How they are given.


def find_parameters(module: nn.Module, ignored: Iterable[str] = ()) -> list[TrainedParameter]:
    """The module's parameters, each once, except those ignored."""
    left_out = set(ignored)
    found: dict[nn.Parameter, TrainedParameter] = {}
    for prefix, part in module.named_modules():
        sparse = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        for own, parameter in part.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            if name not in left_out and parameter not in found:
                found[parameter] = TrainedParameter(name, parameter, sparse)
    return list(found.values())


def groups_of(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters, pairs of name and parameter, or groups of either, as an optimizer's groups.

    Raises:
        TypeError: one tensor, or a set, which has another order on each rank.
    """
    if isinstance(params, Tensor):
        raise TypeError("expected an iterable of parameters, got one tensor")
    if isinstance(params, (set, frozenset)):
        raise TypeError("expected parameters in an order that is equal on all ranks, got a set")
    items = list(params)
    if not items or not isinstance(items[0], dict):
        return [{"params": items}]
    return [
        {
            **group,
            "params": [group["params"]]
            if isinstance(group["params"], Tensor)
            else list(group["params"]),
        }
        for group in items
    ]


def named_parameters(groups: Iterable[dict[str, Any]]) -> list[tuple[str, nn.Parameter]]:
    """An optimizer's parameters with their names, or with numbers where they have none."""
    named: list[tuple[str, nn.Parameter]] = []
    for group in groups:
        names = group.get("param_names")
        for place, parameter in enumerate(group["params"]):
            named.append((names[place] if names else f"parameter {len(named)}", parameter))
    return named


def stepped(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """An optimizer's parameters, in the order of its groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]


# What is equal about them.


def described(tensor: Tensor) -> str:
    """A tensor's shape and dtype, for errors."""
    return f"of shape {tuple(tensor.shape)}, {tensor.dtype}"


def check_group(
    group: dist.ProcessGroup, parameters: Sequence[TrainedParameter], what: str
) -> None:
    """Raises where the group has no backend for the parameters' device."""
    for one in parameters:
        kind = one.parameter.device.type
        if kind not in {device.type for device in group._device_types}:
            able = ", ".join(sorted({device.type for device in group._device_types}))
            raise ValueError(
                f"{what}: parameter {one.name!r} is on {one.parameter.device}, and its group "
                f"reduces tensors on {able} only: move the module, or make a group for {kind}"
            )


def check_equal_models(
    group: dist.ProcessGroup,
    parameters: Sequence[TrainedParameter],
    what: str,
    buffers: Sequence[tuple[str, Tensor]] = (),
) -> None:
    """Collective. Raises on every rank if names, shapes, dtypes or strides differ between ranks.

    Args:
        group: its ranks are compared.
        parameters: in an order that is equal on all ranks.
        what: is made of them, for errors.
        buffers: with their names, where ranks get rank 0's: of those, strides may differ.
    """
    _check_equal(group, {"parameter": _lines(parameters), "buffer": _texts(buffers)}, what)


def check_equal_buffers(
    group: dist.ProcessGroup, buffers: Sequence[tuple[str, Tensor]], what: str
) -> None:
    """Collective. As :func:`check_equal_models`, for buffers that have changed since."""
    _check_equal(group, {"buffer": _texts(buffers)}, what)


def _check_equal(group: dist.ProcessGroup, lines: dict[str, list[str]], what: str) -> None:
    """Compares digests, and the lines only where these differ."""
    facts = {
        f"{kind} {number}": line for kind, ours in lines.items() for number, line in enumerate(ours)
    }
    digest = hashlib.sha256(repr(facts).encode()).digest()
    if len(set(gather_objects(group, digest))) == 1:
        return
    everyone = gather_objects(group, facts)
    found = first_difference(everyone)
    assert found is not None
    text = str(found)
    if found.is_of_some:
        kind = found.name.split()[0]
        counts = [sum(name.startswith(kind) for name in theirs) for theirs in everyone]
        other = next(rank for rank, count in enumerate(counts) if count != counts[0])
        text = f"rank 0 has {counts[0]} {kind}s, and rank {other} has {counts[other]}"
    raise ValueError(f"{what}: the ranks' modules differ: {text}")


def _lines(parameters: Iterable[TrainedParameter]) -> list[str]:
    return [
        f"{one.name!r} {described(one.parameter)}, strides {one.parameter.stride()}"
        f"{'' if one.parameter.requires_grad else ', frozen'}"
        f"{', sparse gradient' if one.sparse else ''}"
        for one in parameters
    ]


def _texts(buffers: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [f"{name!r} {described(one)}" for name, one in buffers]
