"""Splits arguments over replicas by rows, and joins what replicas return, as torch's DataParallel.

Tensors in tuples, named tuples, lists and dicts are split along a dimension; any other object goes
to each replica as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["Rows", "gather", "map_tensors", "version_of"]

Step = str | int


class Rows:
    """The rows of each tensor in the arguments of a call, for its replicas.

    Args:
        arguments: positional ones by number, and others by name.
        count: the number of replicas; with fewer rows each row has one.
        dim: the dimension along which tensors are split.

    Attributes:
        replicas: how many have rows; all if there are no tensors.

    Raises:
        ValueError: a tensor has no rows, or two are split into different numbers of parts, of which
            some would be dropped.
    """

    def __init__(self, arguments: dict[Any, Any], count: int, dim: int) -> None:
        self._parts: dict[int, tuple[Tensor, ...]] = {}
        self._seen: list[tuple[str, Tensor, int]] = []
        for path, tensor in _tensors(arguments, ()):
            name = describe(path)
            if not -tensor.dim() <= dim < tensor.dim():
                raise ValueError(
                    f"DataParallel splits tensors along dimension {dim}: {name} has shape "
                    f"{list(tensor.shape)}; pass a Python number, or a tensor with a row for each "
                    "sample"
                )
            if id(tensor) not in self._parts:
                self._parts[id(tensor)] = tensor.chunk(count, dim)
                self._seen.append((name, tensor, version_of(tensor)))
        for name, tensor, _ in self._seen[1:]:
            self._check_as_many(name, tensor, count)
        self.replicas = len(self._parts[id(self._seen[0][1])]) if self._seen else count

    def of(self, tensor: Tensor, replica: int) -> Tensor:
        """The rows of a tensor for a replica, a view."""
        return self._parts[id(tensor)][replica]

    def check(self) -> None:
        """Raises RuntimeError if a forward pass with a graph has changed an argument in place."""
        for name, tensor, version in self._seen:
            if version_of(tensor) != version and torch.is_grad_enabled():
                raise RuntimeError(
                    f"DataParallel: forward has changed {name} of shape {list(tensor.shape)} in "
                    "place, which the caller's graph would not know; clone it in forward"
                )

    def _check_as_many(self, name: str, tensor: Tensor, count: int) -> None:
        first, other, _ = self._seen[0]
        ours, others = len(self._parts[id(tensor)]), len(self._parts[id(other)])
        if ours != others:
            raise ValueError(
                f"DataParallel splits {first} of shape {list(other.shape)} into {others} parts for "
                f"its {count} replicas, but {name} of shape {list(tensor.shape)} into {ours}: give "
                "each tensor a row for each sample (expand() copies nothing)"
            )


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The value with what `change` returns in place of each tensor, called in order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):  # its parts belong together; it cannot be joined
        return value
    if _is_named(value):
        return type(value)(*(map_tensors(one, change) for one in value))
    if isinstance(value, tuple | list):
        return type(value)([map_tensors(one, change) for one in value])
    if isinstance(value, dict):
        return _dict_like(value, ((key, map_tensors(value[key], change)) for key in value))
    return value


def gather(outputs: Sequence[Any], dim: int, path: tuple[Step, ...] = ()) -> Any:
    """Joins what replicas return: tensors along a dimension, scalars to a vector.

    Raises:
        ValueError: replicas return dicts or sequences of different lengths, or dicts of other keys.
        TypeError: they return what cannot be joined.
    """
    first = outputs[0]
    if isinstance(first, Tensor) and all(isinstance(one, Tensor) for one in outputs):
        rows = [one.unsqueeze(0) if one.dim() == 0 else one for one in outputs]
        return torch.cat(rows, 0 if first.dim() == 0 else dim)
    if all(one is None for one in outputs):
        return None
    if any(type(one) is not type(first) for one in outputs):
        kinds = ", ".join(type(one).__name__ for one in outputs)
        raise TypeError(
            f"DataParallel cannot join {describe(path, 'output')}: replicas return {kinds}"
        )
    if isinstance(first, PackedSequence):
        raise TypeError(
            f"DataParallel cannot join {describe(path, 'output')}, a PackedSequence: unpack it in "
            "forward"
        )
    if isinstance(first, dict):
        if any(one.keys() != first.keys() for one in outputs):
            keys = "; ".join(str(sorted(map(str, one))) for one in outputs)
            raise ValueError(f"replicas return other keys in {describe(path, 'output')}: {keys}")
        found = ((key, gather([o[key] for o in outputs], dim, (*path, key))) for key in first)
        return _dict_like(first, found)
    if isinstance(first, tuple | list):
        if any(len(one) != len(first) for one in outputs):
            lengths = ", ".join(str(len(one)) for one in outputs)
            raise ValueError(f"replicas return lengths {lengths} in {describe(path, 'output')}")
        joined = [
            gather(ones, dim, (*path, i)) for i, ones in enumerate(zip(*outputs, strict=True))
        ]
        return type(first)(*joined) if _is_named(first) else type(first)(joined)
    raise TypeError(
        f"DataParallel cannot join {describe(path, 'output')}, a {type(first).__name__}: replicas "
        "have to return tensors, None, and tuples, lists and dicts of these"
    )


def describe(path: tuple[Step, ...], root: str = "argument") -> str:
    """A place in nested values: "argument 1['mask']"."""
    if not path:
        return f"the {root}"
    first, rest = (f"the {root}", path) if root == "output" else (f"{root} {path[0]!r}", path[1:])
    return first + "".join(f"[{one!r}]" for one in rest)


def _tensors(value: Any, path: tuple[Step, ...]) -> Iterator[tuple[tuple[Step, ...], Tensor]]:
    if isinstance(value, PackedSequence):
        raise ValueError(
            f"DataParallel cannot split the rows of {describe(path)}, a PackedSequence: give it "
            "the padded tensor and the lengths, and pack in forward"
        )
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple | list):
        for i, one in enumerate(value):
            yield from _tensors(one, (*path, i))
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _tensors(one, (*path, key))
    elif _has_tensor_fields(value):
        raise ValueError(
            f"DataParallel does not split {describe(path)}, a {type(value).__name__}, so each "
            "replica would have all of its rows: pass its tensors in a tuple or dict"
        )


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _has_tensor_fields(value: Any) -> bool:
    """True for a dataclass with a tensor."""
    if not is_dataclass(value) or isinstance(value, type):
        return False
    return any(isinstance(getattr(value, one.name, None), Tensor) for one in fields(value))


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _dict_like(value: dict[Any, Any], items: Iterator[tuple[Any, Any]]) -> Any:
    return cast(Any, type(value))(items)
