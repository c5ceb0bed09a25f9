"""The parameters that users give to servers and workers, and a worker's groups of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from dreamcomm.ranks.parameters import groups_of
from dreamcomm.server.layout import TensorSpec

__all__ = ["PlainGroup", "check_gradients", "named", "of_these"]


def named(params: Iterable[Any], who: str) -> tuple[list[str], list[Tensor]]:
    """The parameters that are trained, in order, with their names; "" for those without.

    Args:
        params: tensors, pairs of name and tensor, or groups of them, as torch's optimizers take.
        who: for errors.

    Raises:
        TypeError: an item is none of these.
        ValueError: there is none, or one comes twice.
    """
    names: list[str] = []
    tensors: list[Tensor] = []
    for group in groups_of(params):
        for item in group["params"]:
            name, tensor = item if isinstance(item, tuple) else ("", item)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{who}: expected parameters, got {type(tensor).__name__}")
            if tensor.is_meta:
                raise TypeError(
                    f"{who}: parameter {name or len(tensors)!r} is on the meta device, so it has "
                    "no values; make the model on another one, or call its to_empty()"
                )
            if tensor.requires_grad:
                names.append(name)
                tensors.append(tensor)
    if not tensors:
        raise ValueError(f"{who}: expected parameters that require gradients, got none")
    if len({id(one) for one in tensors}) != len(tensors):
        raise ValueError(f"{who}: a parameter is given twice")
    return names, tensors


def of_these(groups: list[dict[str, Any]], wanted: Iterable[Tensor]) -> list[dict[str, Any]]:
    """The groups with some of their parameters only; those that have none left are dropped."""
    ids = {id(one) for one in wanted}

    def is_wanted(item: Any) -> bool:
        return id(item[1] if isinstance(item, tuple) else item) in ids

    cut = [{**group, "params": [p for p in group["params"] if is_wanted(p)]} for group in groups]
    return [group for group in cut if group["params"]]


class PlainGroup(dict[str, Any]):
    """A worker's group of parameters: what torch's optimizers have in theirs is the server's.

    It never changes; copies of it are plain dicts.
    """

    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(
            f"a Worker has no {key!r}: the optimizer is the server's. A schedule of the learning "
            "rate belongs over ParameterServer.optimizer, in serve(on_update=)"
        )

    def _refuse(self, key: str) -> NoReturn:
        if key not in self:
            self.__missing__(key)
        raise KeyError(
            f"a Worker's {key!r} are those that its servers have; make new servers and workers for "
            "others"
        )

    def __setitem__(self, key: str, value: Any) -> None:
        self._refuse(key)

    def __delitem__(self, key: str) -> None:
        self._refuse(key)

    def __ior__(self, other: Any) -> PlainGroup:  # type: ignore[override,misc]
        self.update(other)
        return self

    def update(self, *given: Any, **more: Any) -> None:
        for key in dict(*given, **more):
            self._refuse(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        return self[key]

    def pop(self, key: str, *default: Any) -> NoReturn:
        self._refuse(key)

    def popitem(self) -> NoReturn:
        self._refuse("params")

    def clear(self) -> None:
        self._refuse("params")

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def check_gradients(
    groups: Iterable[Mapping[str, Any]], tensors: Sequence[Tensor], specs: Sequence[TensorSpec]
) -> None:
    """Checks what a worker is about to push.

    Args:
        groups: of the worker.
        tensors: the parameters that the servers have.
        specs: of these, when the worker was made.

    Raises:
        RuntimeError: the groups have other parameters that require gradients, or other shapes.
        TypeError: a gradient is not dense.
    """
    known = {id(one) for one in tensors}
    given = [one for group in groups for one in group["params"]]
    if {id(one) for one in given if one.requires_grad or id(one) in known} != known:
        raise RuntimeError(
            f"Worker.step: expected its groups to have the {len(known)} parameters that the "
            "servers have, got parameters that were added, removed or unfrozen later; make new "
            "servers and workers for them"
        )
    for number, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
        if tensor.shape != spec.shape:
            raise RuntimeError(
                f"Worker.step: parameter {number} has got the shape {list(tensor.shape)}, and the "
                f"servers have {spec}; make new servers and workers for other shapes"
            )
        if tensor.grad is not None and tensor.grad.layout is not torch.strided:
            raise TypeError(
                f"Worker.step: parameter {number} has a gradient of layout "
                f"{tensor.grad.layout}; servers take dense ones (for an Embedding: "
                "sparse=False)"
            )
