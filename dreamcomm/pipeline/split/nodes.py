"""Which nodes of a traced forward may be computed anew in each stage, in place of being sent."""

from __future__ import annotations

import operator

from torch import fx

from dreamcomm.pipeline.split.factories import RANDOM
from dreamcomm.pipeline.split.guards import check

__all__ = ["NodeKinds"]

_SIZES = frozenset(
    ("shape", "ndim", "dtype", "layout", "itemsize")
)  # attributes that are no tensors
_SIZE_METHODS = frozenset(("size", "dim", "numel", "ndimension", "nelement", "stride"))


class NodeKinds:
    """Sorts the nodes of a graph.

    A repeatable node depends on parameters, buffers and sizes alone, and yields the same each time.
    A size is a number, shape or dtype taken from a tensor: it is sent, as that is cheap.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._changed = _changed_in_place(graph)
        self._sizes: set[fx.Node] = set()
        self._repeatable: set[fx.Node] = set()
        self._devices: set[fx.Node] = set()
        for node in graph.nodes:
            if _attribute(node) == "device":
                self._devices.add(node)
            elif self._is_size(node):
                self._sizes.add(node)
            if self._may_repeat(node):
                self._repeatable.add(node)

    def is_repeatable(self, node: fx.Node) -> bool:
        return node in self._repeatable

    def is_device(self, node: fx.Node) -> bool:
        """Whether it is some tensor's device: each stage has one of its own."""
        return node in self._devices

    def _is_size(self, node: fx.Node) -> bool:
        if _attribute(node) in _SIZES:
            return True
        if node.op == "call_method":
            return node.target in _SIZE_METHODS
        inputs = node.all_input_nodes
        is_operator = node.op == "call_function" and getattr(node.target, "__module__", "") in (
            "_operator",
            "math",
        )
        return is_operator and bool(inputs) and all(one in self._sizes for one in inputs)

    def _may_repeat(self, node: fx.Node) -> bool:
        if node in self._changed:
            return False
        if node.op == "get_attr":
            return True
        if node.op not in ("call_function", "call_method") or _is_impure(node):
            return False
        inputs = node.all_input_nodes
        if node.target is operator.getitem and inputs[0] in self._sizes - self._repeatable:
            return False  # one length is sent, not the shape it is taken from
        known = self._repeatable | self._sizes | self._devices
        return all(one in known for one in inputs)


def _attribute(node: fx.Node) -> str | None:
    """The name of the attribute that the node reads."""
    if node.op == "call_function" and node.target is getattr:
        return str(node.args[1])
    return None


def _is_impure(node: fx.Node) -> bool:
    if node.target is check or _changes(node):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in RANDOM


def _changes(node: fx.Node) -> bool:
    """Whether it changes its first argument in place."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_method = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    is_function = node.op == "call_function" and (
        name in ("_setitem", "setitem") or (name.endswith("_") and not name.endswith("__"))
    )
    return is_method or is_function or "out" in node.kwargs


def _changed_in_place(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value some node changes, and what they may be views of."""
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if _changes(node):
            out = node.kwargs.get("out")
            waiting = [out] if isinstance(out, fx.Node) else node.all_input_nodes[:1]
            while waiting:
                one = waiting.pop()
                if one not in changed and one.op != "call_module":
                    changed.add(one)
                    waiting.extend(one.all_input_nodes[:1])
    return changed
