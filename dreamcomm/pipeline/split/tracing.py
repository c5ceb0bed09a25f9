"""Follows a module's forward down to the calls of its blocks, as a graph that can be cut.

Submodules are leaves, except the lists of blocks and the modules that these are inside of. Sizes
stay open: the graph holds ``x.shape[1]`` as a node, so it serves batches of every size.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn

from dreamcomm.pipeline.split.arguments import Given, Variant
from dreamcomm.pipeline.split.factories import recorded_factories
from dreamcomm.pipeline.split.guards import check, guard_at
from dreamcomm.pipeline.split.open_value import Constant, OpenValue
from dreamcomm.pipeline.split.unchanged import left_unchanged, refused_assignments

__all__ = ["ForwardTracer"]


class ForwardTracer(fx.Tracer):
    """Traces one module for one variant of arguments.

    Args:
        variant: says which arguments stay open.
        entered: ids of the modules whose forward is followed.

    Attributes:
        placeholders: the argument that each placeholder stands for.
    """

    proxy_buffer_attributes = True

    def __init__(self, variant: Variant, entered: set[int]) -> None:
        super().__init__()
        self.variant = variant
        self.entered = entered
        self.placeholders: dict[fx.Node, Given] = {}
        self._constants: dict[int, fx.Node] = {}
        self._thread = threading.get_ident()
        self._autocast = _autocast_state()

    def graph_of(self, module: nn.Module) -> fx.Graph:
        """Traces ``module``, whatever its forward raises meanwhile is passed on."""
        namespaces = [
            getattr(one.forward, "__globals__", {})
            for one in module.modules()
            if id(one) in self.entered
        ]
        with (
            left_unchanged(module, self.entered),
            refused_assignments(module),
            torch.enable_grad(),
            recorded_factories(self, namespaces),
        ):
            return self.trace(module)

    # What fx calls

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        values = {}
        for one in self.variant.given:
            values[one] = proxy = self.create_proxy("placeholder", str(one), (), {})
            self.placeholders[proxy.node] = one
        self._open_plain_tensors()
        return lambda: self.variant.call(self.root.forward, values), []

    def _open_plain_tensors(self) -> None:
        """Makes nodes of tensors that are attributes, but neither parameters nor buffers."""
        for path, module in self.root.named_modules():
            if id(module) in self.entered:
                for name, value in list(vars(module).items()):
                    if isinstance(value, Tensor):
                        target = f"{path}.{name}" if path else name
                        vars(module)[name] = self.create_proxy("get_attr", target, (), {})

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return OpenValue(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self.entered

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not self._is_registered(a):
            if id(a) not in self._constants:  # one node, so that all its uses see a change in place
                node = self.create_node("call_function", Constant(a), (), {})
                self._constants[id(a)] = node
            return self._constants[id(a)]
        return super().create_arg(a)

    def _is_registered(self, tensor: Tensor) -> bool:
        registered = [*self.root.parameters(), *self.root.buffers()]
        return any(tensor is one for one in registered)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, target, *args, **kwargs)
        if _autocast_state() != self._autocast:
            raise ValueError("torch.autocast inside forward cannot be followed")
        node.meta["no_grad"] = not torch.is_grad_enabled()
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        guard = guard_at(_caller())
        if guard is None:
            raise ValueError("a branch, loop or `and`/`or` depends on a value of the batch")
        self.create_proxy("call_function", check, (obj, *guard), {})
        return guard[0]


def _autocast_state() -> list[bool]:
    return [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]


def _caller() -> FrameType | None:
    """The frame of the traced code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename == __file__ or "/torch/fx/" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame
