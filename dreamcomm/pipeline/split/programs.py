"""Runs a segment of a traced forward on the module's own submodules and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dreamcomm.pipeline.split.segments import Segment

__all__ = ["SegmentProgram"]

_Values = dict[fx.Node, Any]


class SegmentProgram:
    """A segment, ready to run.

    Args:
        module: the whole, which names of modules and tensors are looked up in at each run.
        segment: to run.
    """

    def __init__(self, module: nn.Module, segment: Segment) -> None:
        self._module = module
        self.segment = segment
        self.units = {
            str(node.target): module.get_submodule(str(node.target))
            for node in segment.nodes
            if node.op == "call_module"
        }
        self.tensors = {
            str(node.target): value
            for node in segment.nodes
            if node.op == "get_attr" and self._is_registered(str(node.target))
            for value in [_look_up(module, str(node.target))]
            if isinstance(value, Tensor)
        }

    def _is_registered(self, name: str) -> bool:
        """Whether it is a parameter or buffer that belongs to no unit."""
        path, _, last = name.rpartition(".")
        if any(path == unit or path.startswith(f"{unit}.") for unit in self.units):
            return False
        owner = self._module.get_submodule(path)
        return last in owner._parameters or last in owner._buffers

    def run(self, inputs: tuple[Any, ...], arguments: _Values) -> Any:
        """Computes the nodes in order, and forgets each value after its last use.

        Args:
            inputs: as the segment lists them.
            arguments: values of the placeholders that the segment takes from the user.

        Returns:
            The tuple of the segment's outputs; in the last segment what forward returns.
        """
        values: _Values = dict(zip(self.segment.inputs, inputs, strict=True)) | arguments
        if self.segment.devices:
            device = self._device(inputs)
            values |= dict.fromkeys(self.segment.devices, device)
        for node in self.segment.nodes:
            if node.op == "output":
                return _filled(node.args[0], values)
            if node.meta["no_grad"]:
                with torch.no_grad():
                    values[node] = self._compute(node, values)
            else:
                values[node] = self._compute(node, values)
            for one in self.segment.dead.get(node, ()):
                del values[one]
        return tuple(values[one] for one in self.segment.outputs)

    def _compute(self, node: fx.Node, values: _Values) -> Any:
        if node.op == "get_attr":
            return _look_up(self._module, str(node.target))
        args = _filled(node.args, values)
        kwargs = _filled(node.kwargs, values)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        called: Callable[..., Any]
        if node.op == "call_module":
            called = self._module.get_submodule(str(node.target))
        else:
            assert callable(node.target)
            called = node.target
        return called(*args, **kwargs)

    def _device(self, inputs: tuple[Any, ...]) -> torch.device:
        """Where this stage computes."""
        tensors = [one for one in pytree.tree_leaves(inputs) if isinstance(one, Tensor)]
        tensors += [one for unit in self.units.values() for one in unit.parameters()]
        tensors += self.tensors.values()
        return tensors[0].device if tensors else torch.get_default_device()


def _look_up(module: nn.Module, name: str) -> Any:
    value: Any = module
    for step in name.split("."):
        value = getattr(value, step)
    return value


def _filled(argument: Any, values: _Values) -> Any:
    """An argument of a node with values in place of nodes, in plain lists and dicts."""
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, tuple):
        filled = [_filled(one, values) for one in argument]
        return type(argument)(*filled) if hasattr(argument, "_fields") else tuple(filled)
    if isinstance(argument, list):
        return [_filled(one, values) for one in argument]
    if isinstance(argument, dict):
        return {key: _filled(one, values) for key, one in argument.items()}
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return slice(*(_filled(one, values) for one in parts))
    return argument
