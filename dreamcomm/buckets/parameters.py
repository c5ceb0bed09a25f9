"""The parameters that several ranks train, and what has to be equal about them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["TrainedParameter", "check_equal_buffers", "check_equal_models", "check_group"]


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter, with its name and whether its gradient is sparse."""

    name: str
    parameter: torch.nn.Parameter
    sparse: bool = False


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
    buffers: Sequence[tuple[str, torch.Tensor]] = (),
) -> None:
    """Collective. Raises on every rank if names, shapes, dtypes or strides differ between ranks.

    Args:
        group: its ranks are compared.
        parameters: at least one.
        what: is made of them, for errors.
        buffers: with their names, where ranks get rank 0's: of those, strides may differ.
    """
    device = parameters[0].parameter.device
    _check_equal(group, device, [_describe(one) for one in parameters], _lines_of(buffers), what)


def check_equal_buffers(
    group: dist.ProcessGroup,
    buffers: Sequence[tuple[str, torch.Tensor]],
    device: torch.device,
    what: str,
) -> None:
    """Collective. As :func:`check_equal_models`, for buffers that have changed since."""
    _check_equal(group, device, [], _lines_of(buffers), what)


def _check_equal(
    group: dist.ProcessGroup,
    device: torch.device,
    parameters: list[str],
    buffers: list[str],
    what: str,
) -> None:
    digest = hashlib.sha256("\n".join([*parameters, "", *buffers]).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    all_ = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_, mine, group=group)
    if all(torch.equal(one.cpu(), all_[0].cpu()) for one in all_):
        return
    models: list[tuple[list[str], list[str]]] = [([], []) for _ in all_]
    dist.all_gather_object(models, (parameters, buffers), group=group)
    rank, other = next((r, model) for r, model in enumerate(models) if model != models[0])
    kind = 0 if models[0][0] != other[0] else 1
    found = _difference(models[0][kind], other[kind], rank, ("parameter", "buffer")[kind])
    raise ValueError(f"{what}: the ranks' modules differ: {found}")


def _describe(one: TrainedParameter) -> str:
    parameter = one.parameter
    frozen = "" if parameter.requires_grad else ", frozen"
    sparse = ", sparse gradient" if one.sparse else ""
    shape = f"shape {tuple(parameter.shape)}"
    return (
        f"{one.name!r} of {shape}, {parameter.dtype}, strides {parameter.stride()}{frozen}{sparse}"
    )


def _lines_of(buffers: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    return [f"{name!r} of shape {tuple(one.shape)}, {one.dtype}" for name, one in buffers]


def _difference(expected: list[str], got: list[str], rank: int, kind: str) -> str:
    for number, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return f"{kind} {number} is {ours} on rank 0, and {theirs} on rank {rank}"
    return f"rank 0 has {len(expected)} {kind}s, and rank {rank} has {len(got)}"
