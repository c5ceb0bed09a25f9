"""What DistributedDataParallel refuses before anything has moved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter

from dreamcomm.ddp.engine import TrainedParameter

__all__ = [
    "check_equal_models",
    "check_module",
    "check_names",
    "factor_of",
    "find_parameters",
]


def find_parameters(module: nn.Module, ignored: Iterable[str]) -> list[TrainedParameter]:
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


def check_module(module: object, parameters: Sequence[TrainedParameter], what: str) -> None:
    """Raises for what cannot be trained by several ranks."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{what}: expected a torch.nn.Module, got {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{what}: {name or 'the module'} is a {type(part).__name__} already, whose "
                "gradients are reduced; wrap its .module, or do not wrap it again"
            )
    lazy = [one.name for one in parameters if isinstance(one.parameter, UninitializedParameter)]
    if lazy:
        raise ValueError(
            f"{what}: parameter {lazy[0]!r} has no shape yet; run a forward pass on the module "
            "first"
        )
    if not any(one.parameter.requires_grad for one in parameters):
        raise RuntimeError(  # torch's class raises this one
            f"{what}: {type(module).__name__} has no parameter that requires a gradient, so there "
            "is nothing to reduce"
        )
    kinds = {one.parameter.device.type: one.name for one in reversed(parameters)}
    if len(kinds) > 1:
        placed = ", ".join(f"{name!r} on {kind}" for kind, name in sorted(kinds.items()))
        raise ValueError(f"{what}: expected all parameters on devices of one type, got {placed}")


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


def check_names(given: Iterable[str], known: Iterable[str], what: str) -> list[str]:
    """The given names of parameters. Raises where one is of no parameter."""
    names = [given] if isinstance(given, str) else list(given)
    present = list(known)
    for name in names:
        if name not in present:
            near = [other for other in present if name.rpartition(".")[2] in other][:3]
            hint = f"; did you mean {', '.join(map(repr, near))}" if near else ""
            raise ValueError(f"{what}: the module has no parameter {name!r}{hint}")
    return names


def factor_of(reduce: object, what: str) -> float:
    """What the ranks' sum is multiplied by; 0 for the average."""
    if reduce == "mean":
        return 0.0
    if reduce == "sum":
        return 1.0
    if isinstance(reduce, (int, float)) and not isinstance(reduce, bool) and reduce > 0:
        return float(reduce)
    raise ValueError(
        f"{what}: expected reduce to be 'mean', 'sum' or a factor above 0 for the ranks' sum, got "
        f"{reduce!r}"
    )


def check_equal_models(
    group: dist.ProcessGroup, parameters: Sequence[TrainedParameter], what: str
) -> None:
    """Collective. Raises on every rank if names, shapes, dtypes or strides differ between ranks."""
    lines = [_describe(one) for one in parameters]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    device = parameters[0].parameter.device
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    all_ = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_, mine, group=group)
    if all(torch.equal(one.cpu(), all_[0].cpu()) for one in all_):
        return
    models: list[list[str]] = [[] for _ in all_]
    dist.all_gather_object(models, lines, group=group)
    rank, first = next((r, model) for r, model in enumerate(models) if model != models[0])
    raise ValueError(f"{what}: the ranks' modules differ: {_difference(models[0], first, rank)}")


def _describe(one: TrainedParameter) -> str:
    parameter = one.parameter
    frozen = "" if parameter.requires_grad else ", frozen"
    sparse = ", sparse gradient" if one.sparse else ""
    shape = f"shape {tuple(parameter.shape)}"
    return (
        f"{one.name!r} of {shape}, {parameter.dtype}, strides {parameter.stride()}{frozen}{sparse}"
    )


def _difference(expected: list[str], got: list[str], rank: int) -> str:
    for number, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return f"parameter {number} is {ours} on rank 0, and {theirs} on rank {rank}"
    return f"rank 0 has {len(expected)} parameters, and rank {rank} has {len(got)}"
