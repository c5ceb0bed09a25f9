"""Which nodes of a traced forward may be computed anew in each stage, in place of being sent."""

from __future__ import annotations

import operator

from torch import fx
from torch.utils import _pytree as pytree

from dreamcomm.pipeline.split.factories import RANDOM
from dreamcomm.pipeline.split.guards import check
from dreamcomm.pipeline.split.open_value import IN_PLACE

__all__ = ["NodeKinds", "changed_value"]

_SIZES = frozenset(
    ("shape", "ndim", "dtype", "layout", "itemsize")
)  # attributes that are no tensors
_IN_PLACE_METHODS = frozenset(f"__{one.__name__}__" for one in IN_PLACE)
_SIZE_METHODS = frozenset(("size", "dim", "numel", "ndimension", "nelement", "stride"))


class NodeKinds:
    """Sorts the nodes of a graph.

    A repeatable node depends on parameters, buffers and sizes alone, and yields the same each time.
    A size is a number, shape or dtype taken from a tensor: it is sent, as that is cheap.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._sizes: set[fx.Node] = set()
        self._repeatable: set[fx.Node] = set()
        self._devices: set[fx.Node] = set()
        for node in graph.nodes:
            if _attribute(node) == "device":
                self._devices.add(node)
            elif self._is_size(node):
                self._sizes.add(node)
        self._changed = self._changed_in_place(graph)
        for node in graph.nodes:
            if self._may_repeat(node):
                self._repeatable.add(node)

    def is_repeatable(self, node: fx.Node) -> bool:
        return node in self._repeatable

    def is_changed(self, node: fx.Node) -> bool:
        """Whether forward changes it in place."""
        return node in self._changed

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
        if node.op not in ("call_function", "call_method") or self._is_impure(node):
            return False
        inputs = node.all_input_nodes
        if node.target is operator.getitem and inputs[0] in self._sizes - self._repeatable:
            return False  # one length is sent, not the shape it is taken from
        known = self._repeatable | self._sizes | self._devices
        return all(one in known for one in inputs)

    def _is_impure(self, node: fx.Node) -> bool:
        return node.target is check or self._is_change(node) or _name(node) in RANDOM

    def _is_change(self, node: fx.Node) -> bool:
        """Whether it changes a tensor in place; ``length += 1`` does not."""
        return _changes(node) and node not in self._sizes

    def _changed_in_place(self, graph: fx.Graph) -> set[fx.Node]:
        """Nodes whose value some node changes, and what they may be views of."""
        changed: set[fx.Node] = set()
        for node in graph.nodes:
            if not self._is_change(node):
                continue
            outs = [one for one in pytree.tree_leaves(node.kwargs.get("out")) if one is not None]
            waiting = outs or node.all_input_nodes[:1]
            while waiting:
                one = waiting.pop()
                if one not in changed and one.op != "call_module":
                    changed.add(one)
                    waiting.extend(one.all_input_nodes[:1])
        return changed


def _attribute(node: fx.Node) -> str | None:
    """The name of the attribute that the node reads."""
    if node.op == "call_function" and node.target is getattr:
        return str(node.args[1])
    return None


def _name(node: fx.Node) -> str:
    """The name of the function or method that the node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _changes(node: fx.Node) -> bool:
    """Whether it changes its first argument in place, if that is a tensor."""
    name = _name(node)
    is_named_so = name.endswith("_") and not name.endswith("__")
    if node.op == "call_method":
        changes = is_named_so or name in _IN_PLACE_METHODS
    elif node.op == "call_function":
        of_python = getattr(node.target, "__module__", "") == "_operator"  # it has and_, or_, not_
        changes = node.target in IN_PLACE or name in ("_setitem", "setitem")
        changes = changes or (is_named_so and not of_python)
        changes = changes or node.kwargs.get("inplace") is True
    else:
        return False
    return changes or "out" in node.kwargs


def changed_value(node: fx.Node) -> fx.Node:
    """What the node is another name of, where it is the result of changes in place."""
    while _changes(node) and "out" not in node.kwargs and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
