"""What the ranks run in test_spawn.py: fresh interpreters import it from beside the tests."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist


def describe(offset: int, scale: int = 1) -> tuple[int, int, torch.Tensor]:
    """Rank, world size, and the sum of (rank + offset) * scale over the ranks."""
    value = torch.full((3,), float((dist.get_rank() + offset) * scale))
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value


def environment() -> dict[str, str]:
    return dict(os.environ)


def threads() -> int:
    return torch.get_num_threads()


def initialised() -> bool:
    return dist.is_initialized()


def change(values: list[int]) -> list[int]:
    values.append(dist.get_rank())
    return values


def init_twice(backend: str) -> float:
    dist.destroy_process_group()
    dist.init_process_group(backend)
    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()


def leave_early(rank: int, how: str) -> None:
    """One rank fails in the middle of a call that the others wait in."""
    dist.barrier()
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("no such fruit: käse")
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def unpicklable() -> object:
    return lambda: None


def crash_after_return() -> None:
    """Dies in the interpreter's own clean-up, when the result is long at home."""
    import atexit

    atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
