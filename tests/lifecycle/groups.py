"""Makes and uses process groups inside of a rank that counts what they leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def group_of(
    backend: str, store: str, rank: int, world: int, seconds: float = 30.0
) -> Iterator[None]:
    """The default group; `store` is a file's name, another for every group."""
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def use_everything() -> None:
    """Collectives of all sorts, messages, and a second group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.full((100_000,), float(rank))
    dist.all_reduce(data)
    assert data[0].item() == world * (world - 1) / 2
    work = dist.all_reduce(data, async_op=True)
    assert work is not None
    work.wait()
    second = dist.new_group()
    dist.broadcast(data, 0, group=second)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, rank)
    assert found == list(range(world))
    before, after = (rank - 1) % world, (rank + 1) % world
    sent = dist.isend(data, after)
    dist.recv(torch.empty_like(data), before)
    assert sent is not None
    sent.wait()


def error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:  # DistBackendError is one
        return f"{type(error).__name__}: {error}"
    return "no error"


def end_of(call: Any) -> tuple[str, float]:
    """What went wrong, also "interrupted", and after how many seconds."""
    begin = time.monotonic()
    try:
        text = error_of(call)
    except KeyboardInterrupt:
        text = "interrupted"
    return text, time.monotonic() - begin


class Deadly(dist.Store):
    """A store that sends its process a signal once a key has been set."""

    def __init__(self, inner: dist.Store, last: str, number: int) -> None:
        super().__init__()
        self.inner, self.last, self.number = inner, last, number

    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value)
        if key.endswith(self.last):
            os.kill(os.getpid(), self.number)

    def get(self, key: str) -> bytes:
        found: bytes = self.inner.get(key)
        return found

    def add(self, key: str, value: int) -> int:
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.inner.wait(keys, *timeout)
