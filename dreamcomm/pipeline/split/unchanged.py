"""Leaves a module as it is, whatever its forward does while it is traced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from dreamcomm.pipeline.split.nodes import changed_value

__all__ = ["left_unchanged", "refused_assignments"]


@contextmanager
def left_unchanged(module: nn.Module, entered: set[int]) -> Iterator[None]:
    """Restores the tensors of all modules, and all attributes of those whose forward is followed.

    Args:
        module: the root of the trace.
        entered: ids of the modules whose forward is followed.
    """
    tables: list[dict[str, Any]] = []
    for one in module.modules():
        tables += [one._parameters, one._buffers]
        if id(one) in entered:
            tables.append(vars(one))
    kept = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, before in kept:
            for name in [name for name in table if name not in before]:
                del table[name]
            for name, value in before.items():
                if table.get(name) is not value:
                    table[name] = value


@contextmanager
def refused_assignments(root: nn.Module) -> Iterator[None]:
    """Makes ``self.name = value`` raise for an open value, as the parts would not do it.

    ``self.name += 1`` on a tensor is a change in place: its assignment changes nothing.

    Args:
        root: of the trace.
    """
    original, thread = nn.Module.__setattr__, threading.get_ident()

    def assign(module: nn.Module, name: str, value: Any) -> None:
        if not issubclass(type(value), fx.Proxy) or threading.get_ident() != thread:
            original(module, name, value)
        elif not _is_its_own(root, module, name, changed_value(value.node)):
            raise ValueError(
                f"it assigns {name!r} of a module. Only a change in place of a tensor, as by "
                f"`self.{name}.copy_(...)`, can be followed"
            )

    nn.Module.__setattr__ = assign  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]


def _is_its_own(root: nn.Module, module: nn.Module, name: str, node: fx.Node) -> bool:
    """Whether the node stands for what the attribute has."""
    plain: Any = vars(module).get(name)
    if issubclass(type(plain), fx.Proxy):
        return bool(plain.node is node)
    if node.op != "get_attr":
        return False
    path, _, last = str(node.target).rpartition(".")
    tensor = _registered(module, name)
    return tensor is not None and tensor is _registered(root.get_submodule(path), last)


def _registered(module: nn.Module, name: str) -> Any:
    return module._parameters.get(name, module._buffers.get(name))
