"""Ranks as threads, each with a device of its own of the tests' accelerator (tests/device)."""

from __future__ import annotations

import importlib
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dreamcomm import _C

Body = Callable[[Any, int], None]


def device_module() -> Any:
    return importlib.import_module("dreamcomm_test_device")


def no_inner(*_: object) -> Any:
    raise RuntimeError("this call was handed to torch's own group")


def run_on_devices(
    size: int, body: Body, *, seconds: float = 60, registered: int = 0, **kind: float
) -> None:
    """Calls ``body(backend, rank)`` on every rank; raises what failed. Groups are closed after.

    ``registered``: bytes of each rank's registered memory.
    """
    device = device_module()
    store = dist.HashStore()
    failures: dict[int, str] = {}

    def run_rank(rank: int) -> None:
        try:
            device.use_device(rank)
            prefix = dist.PrefixStore("group", store)
            backend = make_backend(prefix, rank, size, seconds, registered, **kind)
            body(backend, rank)
            backend.shutdown()
        except Exception:
            failures[rank] = traceback.format_exc()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())


def make_backend(
    store: Any, rank: int, size: int, seconds: float, registered: int, **kind: float
) -> Any:
    options = _C.Options(
        cuda="dreamcomm",
        cuda_heap_bytes=registered,
        timeout=timedelta(seconds=seconds),
        heap_bytes=0,
        costs="fixed",
    )
    options._serve_device(device_module().kind(**kind))
    return _C.DreamBackend(store, rank, size, options, no_inner)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, made in the order of the current stream."""
    made: torch.Tensor = device_module().to_device(tensor)
    return made


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, after all that the current stream has been given."""
    made: torch.Tensor = device_module().to_host(tensor)
    return made
