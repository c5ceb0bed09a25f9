"""What the tests of model servers share: stores, made-up gradients, and ranks that take roles."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.server import ParameterServer, ServerReport, Worker

# What a machine that is busy with other tests needs; nothing waits so long where all is well.
PATIENCE = 60.0


def free_address() -> str:
    """Of a store that some rank will hold."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def common_store() -> dist.Store:
    """A store of the default group's ranks; rank 0 holds it."""
    holds = dist.get_rank() == 0
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if holds else None
    port: list[Any] = [store.port if store is not None else 0]
    dist.broadcast_object_list(port, 0)
    return store or dist.TCPStore("127.0.0.1", port[0], None, False)


@contextmanager
def held_store() -> Iterator[str]:
    """The address of a store that the process of the tests holds."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield f"127.0.0.1:{store.port}"
    del store


class Board:
    """A number of each rank in a file that all map. All bytes of one are written at once."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def __getitem__(self, rank: int) -> int:
        return int(self._numbers[8 * rank])

    def __setitem__(self, rank: int, value: int) -> None:
        self._numbers[8 * rank] = value


def board_file(folder: Path) -> str:
    path = folder / "board"
    path.write_bytes(bytes(64 * 16))
    return str(path)


def parameters(*shapes: Sequence[int], value: float = 0.0) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full(tuple(shape), value)) for shape in shapes]


def made_gradient(parameter: Tensor, number: int, rank: int, step: int) -> Tensor:
    """Depends on the weights, so that a wrong one shows in all later steps."""
    generator = torch.Generator().manual_seed(100_000 * rank + 1000 * number + step)
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
    gradient = (noise + parameter.detach().float() / 8).to(parameter.dtype)
    # As autograd's: in the parameter's own order in memory.
    return torch.empty_like(parameter.detach()).copy_(gradient)


def give_gradients(tensors: Sequence[Tensor], rank: int, step: int) -> None:
    for number, one in enumerate(tensors):
        one.grad = made_gradient(one, number, rank, step)


def values(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.detach().clone() for one in tensors]


def differing(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[int]:
    """The numbers of those whose bits differ."""
    return [
        number
        for number, (one, other) in enumerate(zip(found, expected, strict=True))
        if not torch.equal(one, other)
    ]


def seconds(call: Callable[[], Any], *kinds: type[BaseException]) -> tuple[float, str, str]:
    """How long a call took, the kind of error that it raised, and its text."""
    began = time.monotonic()
    try:
        call()
    except kinds as error:
        return time.monotonic() - began, type(error).__name__, str(error)
    return time.monotonic() - began, "", ""


class Noted(logging.Handler):
    """The log of "dreamcomm.server": when, and what."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))

    def texts(self) -> list[str]:
        return [text for _, text in self.lines]


@contextmanager
def noted() -> Iterator[Noted]:
    handler, logger = Noted(), logging.getLogger("dreamcomm.server")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def end_now() -> None:
    """As a kill: nothing is closed."""
    os._exit(7)


class Momentum(torch.optim.Optimizer):
    """SGD with momentum 0.9 that starts faster than torch's, which imports its compiler."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    buffer = self.state[one].get("buffer", torch.zeros_like(one))
                    self.state[one]["buffer"] = buffer = 0.9 * buffer + one.grad
                    one.sub_(group["lr"] * buffer)


def start_fast() -> None:
    """Leaves torch's compiler out of optimizers in this process: to import it takes seconds."""
    for function in vars(torch.optim.Optimizer).values():
        inner = getattr(function, "__wrapped__", None)
        if inner is not None:
            inner.__dynamo_disable = inner


def serve_rank(
    params: Sequence[Any],
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    /,
    **options: Any,
) -> ServerReport:
    """A server of the default group's rank, which is its index."""
    options.setdefault("timeout", PATIENCE)
    serves = {
        key: options.pop(key) for key in ("checkpoint", "every", "on_update") & options.keys()
    }
    return ParameterServer(params, kind, **options).serve(**serves)


def worker(params: Sequence[Any], servers: int = 1, **options: Any) -> Worker:
    options.setdefault("timeout", PATIENCE)
    return Worker(params, servers, **options)


def simulated(
    tensors: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Sequence[int]],
    first_step: int = 0,
) -> list[list[Tensor]]:
    """The weights after each step, with the averages of these ranks' gradients; in one process."""
    found = []
    for step, ranks in enumerate(steps, first_step):
        sums = [torch.zeros(0)] * len(tensors)
        for place, rank in enumerate(sorted(ranks)):
            for number, one in enumerate(tensors):
                gradient = made_gradient(one, number, rank, step)
                sums[number] = gradient if place == 0 else sums[number] + gradient
        for one, total in zip(tensors, sums, strict=True):
            one.grad = total / len(ranks)
        optimizer.step()
        found.append(values(tensors))
    return found
