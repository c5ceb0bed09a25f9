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
from dreamcomm._torch.gloo_nccl import make_inner

Body = Callable[[Any, int], None]


def device_module() -> Any:
    return importlib.import_module("dreamcomm_test_device")


def no_inner(*_: object) -> Any:
    raise RuntimeError("this call was handed to torch's own group")


class Engines:
    """torch's own groups for ranks that are threads: Gloo, and on devices one that stands for NCCL.

    Those of one store meet each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.boards: list[Any] = []

    def make(self, store: Any, rank: int, size: int, options: Any, device_type: str) -> Any:
        if device_type != "cuda":
            return make_inner(store, rank, size, options, device_type)
        with self._lock:
            if store.add("visitors", 1) == 1:
                store.set("board", str(len(self.boards)))
                self.boards.append(device_module().Board())
            board = self.boards[int(store.get("board"))]
        return device_module().Engine(board, rank, size)


def run_on_devices(
    size: int,
    body: Body,
    *,
    seconds: float = 60,
    registered: int = 0,
    hosts: str | None = None,
    halves: str = "float32",
    engines: Engines | None = None,
    **kind: float,
) -> list[Any]:
    """Calls ``body(backend, rank)`` on every rank; raises what failed. Groups are closed after.

    ``registered``: bytes of each rank's registered memory. ``hosts``: as the option. Returns where
    the groups' engines met.
    """
    device = device_module()
    store = dist.HashStore()
    engines = engines or Engines()
    failures: dict[int, str] = {}

    def run_rank(rank: int) -> None:
        try:
            device.use_device(rank)
            prefix = dist.PrefixStore("group", store)
            options = make_options(seconds, registered, **kind)
            options.hosts, options.internode_dtype = hosts or "", halves
            make = engines.make if hosts else no_inner
            backend = _C.DreamBackend(prefix, rank, size, options, make)
            body(backend, rank)
            backend.shutdown()
        except BaseException:  # also what pytest fails with
            failures[rank] = traceback.format_exc()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
    return engines.boards


def make_options(seconds: float, registered: int, **kind: float) -> Any:
    options = _C.Options(
        cuda="dreamcomm",
        cuda_heap_bytes=registered,
        timeout=timedelta(seconds=seconds),
        heap_bytes=0,
        costs="fixed",
    )
    options._serve_device(device_module().kind(**kind))
    return options


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, made in the order of the current stream."""
    made: torch.Tensor = device_module().to_device(tensor)
    return made


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, after all that the current stream has been given."""
    made: torch.Tensor = device_module().to_host(tensor)
    return made
