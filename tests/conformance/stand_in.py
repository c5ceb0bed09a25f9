"""Has torch's tests make another class in the place of torch's DistributedDataParallel."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any


def install(name: str, suite: ModuleType) -> Callable[[], None]:
    """Has `suite` make "package.Class"; returns what raises where this process has made none.

    The suite finds the class in torch.nn.parallel and among its own names.
    """
    import torch

    package, _, own = name.rpartition(".")
    wrapper: Any = getattr(importlib.import_module(package), own)
    parallel: Any = torch.nn.parallel
    parallel.DistributedDataParallel = wrapper
    suite.DistributedDataParallel = wrapper  # type: ignore[attr-defined]
    init = wrapper.__init__
    made = 0

    @functools.wraps(init)
    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal made
        made += 1
        init(self, *args, **kwargs)

    def check() -> None:
        assert made, f"the test has made no {name}"

    wrapper.__init__ = counted
    return check
