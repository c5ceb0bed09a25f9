"""The outer optimizer of DiLoCo, over the outer parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["described_outer", "made_outer"]

COMPARED = (bool, int, float, str, tuple, Tensor)  # other objects print their address


def made_outer(
    given: Optimizer | Callable[[list[nn.Parameter]], Optimizer],
    own: Sequence[nn.Parameter],
    outer: list[nn.Parameter],
) -> Optimizer:
    """An optimizer over the outer parameters.

    Args:
        given: makes it; or an optimizer over ``own``, which gets the outer ones instead.
        own: the model's parameters.
        outer: a copy of each.

    Raises:
        ValueError: it has other parameters, or has stepped already.
        TypeError: ``given`` makes no optimizer.
    """
    if isinstance(given, Optimizer):
        _move(given, own, outer)
        return given
    if not callable(given):
        raise TypeError(
            f"DiLoCo: expected outer to be a function or an optimizer, got {type(given).__name__}"
        )
    made = given(outer)
    if not isinstance(made, Optimizer):
        raise TypeError(f"DiLoCo: expected outer to make an optimizer, got a {type(made).__name__}")
    if _ids(made) != sorted(map(id, outer)):
        raise ValueError(
            f"DiLoCo: expected outer to make an optimizer of the {len(outer)} parameters that it "
            f"is given, got one of {len(_ids(made))}; the others would never change"
        )
    return made


def _move(given: Optimizer, own: Sequence[nn.Parameter], outer: list[nn.Parameter]) -> None:
    if given.state:
        raise ValueError("DiLoCo: the outer optimizer has stepped already; give a new one")
    outer_of = {id(one): other for one, other in zip(own, outer, strict=True)}
    if _ids(given) != sorted(outer_of):
        raise ValueError(
            "DiLoCo: the outer optimizer has other parameters than the inner one; give both "
            "model.parameters(), or give a function that makes the outer one"
        )
    for group in given.param_groups:
        group["params"] = [outer_of[id(one)] for one in group["params"]]


def _ids(optimizer: Optimizer) -> list[int]:
    return sorted(id(one) for group in optimizer.param_groups for one in group["params"])


def described_outer(optimizer: Optimizer) -> dict[str, Any]:
    """What has to be equal on all ranks, as each steps its own copy."""
    texts: dict[str, Any] = {"outer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params" and isinstance(value, COMPARED):
                texts[f"outer.param_groups[{number}][{name!r}]"] = value
    return texts
