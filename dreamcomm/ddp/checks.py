"""What DistributedDataParallel refuses before anything has moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parameter import UninitializedParameter

from dreamcomm.ranks.parameters import TrainedParameter

__all__ = [
    "check_module",
    "check_names",
]


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
