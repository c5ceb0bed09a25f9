"""The outer optimizer of DiLoCo, over the outer parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dreamcomm.ranks.parameters import stepped

__all__ = ["described_outer", "give_pseudo_gradient", "made_outer"]

COMPARED = (bool, int, float, str, tuple, Tensor)  # other objects print their address


def made_outer(
    given: Optimizer | Callable[[list[nn.Parameter]], Optimizer],
    numbers: Mapping[int, int],
    outer: list[nn.Parameter],
) -> Optimizer:
    """An optimizer over the outer parameters.

    Args:
        given: makes it; or an optimizer over the model's, which gets the outer ones instead.
        numbers: by the id of each of the model's parameters, the number of its outer one.
        outer: a copy of the model's, one for each memory.

    Raises:
        ValueError: it has other parameters, or has stepped already.
        TypeError: ``given`` makes no optimizer.
    """
    if isinstance(given, Optimizer):
        _move(given, numbers, outer)
        return given
    if not callable(given):
        raise TypeError(
            f"DiLoCo: expected outer to be a function or an optimizer, got {type(given).__name__}"
        )
    made = given(outer)
    if not isinstance(made, Optimizer):
        raise TypeError(f"DiLoCo: expected outer to make an optimizer, got a {type(made).__name__}")
    if sorted(map(id, stepped(made))) != sorted(map(id, outer)):
        raise ValueError(
            f"DiLoCo: expected outer to make an optimizer of the {len(outer)} parameters that it "
            f"is given, got one of {len(stepped(made))}; the others would never change"
        )
    return made


def _move(given: Optimizer, numbers: Mapping[int, int], outer: list[nn.Parameter]) -> None:
    if given.state:
        raise ValueError("DiLoCo: the outer optimizer has stepped already; give a new one")
    if sorted(map(id, stepped(given))) != sorted(numbers):
        raise ValueError(
            "DiLoCo: the outer optimizer has other parameters than the inner one; give both "
            "model.parameters(), or give a function that makes the outer one"
        )
    taken: set[int] = set()
    for group in given.param_groups:
        found = [numbers[id(one)] for one in group["params"]]
        first = [place for place, number in enumerate(found) if number not in found[:place]]
        kept = [place for place in first if found[place] not in taken]  # one for each memory
        taken.update(found)
        if "param_names" in group:
            group["param_names"] = [group["param_names"][place] for place in kept]
        group["params"] = [outer[found[place]] for place in kept]


def give_pseudo_gradient(outer: nn.Parameter, part: Tensor, trained: bool) -> None:
    """Gives a pseudo-gradient to the outer optimizer.

    A frozen parameter gets the mean, and is left alone after that: the outer momentum and weight
    decay are not for it, as the inner ones are not.

    Args:
        outer: parameter.
        part: its mean pseudo-gradient.
        trained: whether the rank's own parameter is not frozen.
    """
    part = part.to(outer.dtype)
    if trained:
        outer.grad = part
    else:
        outer.detach().sub_(part)


def described_outer(optimizer: Optimizer) -> dict[str, Any]:
    """What has to be equal on all ranks, as each steps its own copy."""
    texts: dict[str, Any] = {"outer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params" and isinstance(value, COMPARED):
                texts[f"outer.param_groups[{number}][{name!r}]"] = value
    return texts
