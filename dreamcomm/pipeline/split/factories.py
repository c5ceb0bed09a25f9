"""Records calls that make tensors while a forward is traced.

``torch.arange(t)`` with a value that is open in the trace is an error in torch, and
``torch.randn(3)`` would be drawn once, at the trace. For the duration of a trace both become nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

__all__ = ["RANDOM", "recorded_factories"]

# Functions whose result differs from call to call.
RANDOM = frozenset(
    (
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
        *("normal", "bernoulli", "multinomial", "poisson", "empty", "empty_like", "rrelu"),
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"),
        *("feature_alpha_dropout", "gumbel_softmax", "scaled_dot_product_attention"),
    )
)
_FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros"),
    *("tril_indices", "triu_indices"),
)
_WITH_OPEN_VALUES = ("finfo", "iinfo")


@contextmanager
def recorded_factories(tracer: fx.Tracer, namespaces: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Makes a node of each call of a factory by this thread.

    Args:
        tracer: gets the nodes.
        namespaces: globals of the traced code, where ``from torch import arange`` may stand.
    """
    wrappers = {id(getattr(torch, name)): _wrapper(tracer, name, True) for name in _FACTORIES}
    wrappers |= {
        id(getattr(torch, name)): _wrapper(tracer, name, False) for name in _WITH_OPEN_VALUES
    }
    replaced = []
    seen = {id(one): one for one in (vars(torch), *namespaces)}
    for namespace in seen.values():
        for name, value in list(namespace.items()):
            if id(value) in wrappers:
                replaced.append((namespace, name, value))
                namespace[name] = wrappers[id(value)]
    try:
        yield
    finally:
        for namespace, name, value in replaced:
            namespace[name] = value


def _wrapper(tracer: fx.Tracer, name: str, always: bool) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(torch, name)
    thread = threading.get_ident()

    @wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        is_open = any(isinstance(one, fx.Proxy) for one in pytree.tree_leaves((args, kwargs)))
        if threading.get_ident() == thread and (always or is_open):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return call
