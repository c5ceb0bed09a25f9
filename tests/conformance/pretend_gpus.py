"""Lets CPU tensors stand in for CUDA ones, for tests written for one GPU per rank.

``.cuda()`` returns the CPU tensor, a cuda device means cpu, DistributedDataParallel's
``device_ids`` are dropped. Some tests then fail for want of a real GPU: only those that
pass with Gloo under the same pretence say something about a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def _to_cpu(device: Any) -> Any:
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, (str, torch.device)) and str(device).startswith("cuda"):
        return torch.device("cpu")
    return device


class _CpuMode(TorchFunctionMode):
    """Sends every device argument through `_to_cpu`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _to_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


class _Nothing:
    """Stands for a stream or a device: every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def install(world: int) -> Callable[[int], AbstractContextManager[Any]]:
    """Patches torch in this process; returns what a rank enters with its number."""
    from torch.testing._internal import common_distributed

    current = {"rank": 0}
    common_distributed.TEST_CUDA = True
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count = lambda: True, lambda: world
    cuda.current_device = lambda: current["rank"]
    for name in [
        "set_device",
        "synchronize",
        "manual_seed",
        "manual_seed_all",
        "empty_cache",
        "_lazy_init",
    ]:  # one function each: torch.compile wants them distinct
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.device = cuda.Stream = cuda.stream = cuda.Event = cuda.current_stream = _Nothing
    _patch_modules()

    def enter(rank: int) -> AbstractContextManager[Any]:
        current["rank"] = rank
        return _CpuMode()

    return enter


def _patch_modules() -> None:
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    tensor.cuda = module.cuda = lambda self, *args, **kwargs: self
    to, init = module.to, ddp.__init__

    def to_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        return to(self, *[_to_cpu(x) for x in args], **{k: _to_cpu(x) for k, x in kwargs.items()})

    def without_device_ids(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any
    ) -> None:
        init(self, module, **kwargs)

    module.to = to_cpu
    ddp.__init__ = without_device_ids
