"""The optimizer of this rank's rows: one of torch's, with the options of the whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dreamcomm.zero.shards import ParameterShard
from dreamcomm.zero.widened import widened

__all__ = ["make_inner", "step_rows", "sync_options"]


def make_inner(
    kind: type[Optimizer],
    defaults: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    shards: Mapping[int, ParameterShard],
) -> Optimizer:
    """An optimizer of the groups' rows. Groups get the options that they lack.

    Args:
        kind: its class.
        defaults: what it is made with.
        groups: of whole parameters.
        shards: by the ids of parameters.
    """
    given = []
    for group in groups:
        tensors = [shards[id(one)].tensor for one in group["params"]]
        given.append({**_options(group), "params": tensors})
    inner = kind(given, **defaults)
    for group, made in zip(groups, inner.param_groups, strict=True):
        for key, value in _options(made).items():
            group.setdefault(key, value)
    return inner


def sync_options(groups: Sequence[dict[str, Any]], inner: Optimizer) -> None:
    """Gives the inner optimizer the options that schedulers and users have set."""
    for group, made in zip(groups, inner.param_groups, strict=True):
        made.update(_options(group))
        if group["params"] and group["params"][0].device.type == "cpu":
            # One form of the step, whose bits do not depend on where a rank's rows begin.
            made.update({key: False for key in ("foreach", "fused") if key in made})


def step_rows(
    inner: Optimizer,
    shards: Sequence[ParameterShard],
    gradients: Sequence[Tensor | None],
    *,
    widens: bool = False,
) -> list[ParameterShard]:
    """Steps rows with flat gradients, where there are any. Returns what was stepped.

    Args:
        inner: steps them.
        shards: have the rows.
        gradients: of the rows, flat.
        widens: rows of 16 bits are stepped in float32, and rounded once. torch's kernels round
            elements of 16 bits otherwise at the end of a row than before.
    """
    narrow = [one.tensor for one in shards if widens and one.tensor.dtype.itemsize == 2]
    with widened(inner, narrow):
        return _step_rows(inner, shards, gradients)


def _step_rows(
    inner: Optimizer, shards: Sequence[ParameterShard], gradients: Sequence[Tensor | None]
) -> list[ParameterShard]:
    stepped = []
    for one, gradient in zip(shards, gradients, strict=True):
        if gradient is not None:
            one.tensor.grad = one.shaped(gradient).to(one.tensor.dtype)
            stepped.append(one)
    inner.step()
    for one in stepped:
        one.tensor.grad = None
    return stepped


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
