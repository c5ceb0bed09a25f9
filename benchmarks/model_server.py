"""Times a step of two workers with one model server, beside torch's RPC and beside all_reduce.

    python benchmarks/model_server.py --json server.json        # 2 minutes
    python benchmarks/model_server.py --rounds 5 --size 1048576

Three ranks: a server, and two workers that compute nothing, so a step is the exchange and the
server's SGD step. A turn of a line is one step of both workers; all lines of a size take turns in
one run of the same processes, and a turn's order rotates. A step lasts from the first worker's
begin to the last worker's end, by the clock that the processes share. At the end of a size all
lines have to have the same weights.

Torch's RPC is the batch-updating server of torch's tutorial ("Implementing Batch RPC Processing
Using Asynchronous Executions"): workers send their gradients as one flat tensor and get the
weights as the future's value. The lines with all_reduce average the flat gradients and step on each
worker, as DistributedDataParallel does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed import rpc

import dreamcomm
from dreamcomm.server import ParameterServer, Worker
from dreamcomm.tools.bench.busy import busy_processes
from dreamcomm.tools.bench.measurement import BesideEach, Json, Measurement, sized
from dreamcomm.tools.bench.statistics import percentile
from dreamcomm.tools.bench.turns import Span, lasted, spanned, take_turns

SIZES = (64 << 10, 1 << 20, 25 << 20, 100 << 20)
WORKERS, WARM_UP = 2, 3
LR = 0.5
OURS, RPC = "dreamcomm's server", "torch's RPC"
REDUCE, REDUCE_GLOO = "all_reduce, dreamcomm", "all_reduce, gloo"

Moments = dict[str, list[Span]]


@dataclass(frozen=True)
class Line:
    """The median of one line at one size, beside so many busy processes."""

    name: str
    nbytes: int
    beside: int
    p50_ms: float
    p90_ms: float


class RpcServer:
    """The tutorial's server: the last gradient of a round steps, and sets the round's future."""

    def __init__(self, count: int) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(count))
        self.optimizer = torch.optim.SGD([self.parameter], lr=LR)
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._sum: Tensor | None = None
        self._count = 0

    def take(self, gradient: Tensor) -> torch.futures.Future[Tensor]:
        with self._lock:
            future = self._future
            self._sum = gradient if self._sum is None else self._sum.add_(gradient)
            self._count += 1
            if self._count == WORKERS:
                self.parameter.grad = self._sum.div_(WORKERS)
                self.optimizer.step()
                self._sum, self._count, self._future = None, 0, torch.futures.Future()
                future.set_result(self.parameter.detach())
        return future


@cache
def rpc_server(count: int) -> RpcServer:
    """The server of this process for so many elements."""
    return RpcServer(count)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def update(gradient: Tensor) -> torch.futures.Future[Tensor]:
    """Runs on the server."""
    return rpc_server(gradient.numel()).take(gradient)


def run_rank(sizes: list[int], rounds: int) -> dict[int, Moments]:
    torch.set_num_threads(1)
    rank = dist.get_rank()
    workers = dist.new_group(list(range(1, WORKERS + 1)))
    gloo = dist.new_group(list(range(1, WORKERS + 1)), backend="gloo")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=WORKERS + 1)  # type: ignore[no-untyped-call]
    found = {}
    for number, nbytes in enumerate(sizes):
        if rank == 0:
            rpc_server(nbytes // 4)  # made once, before the threads of calls ask for it
        dist.barrier()
        if rank == 0:
            parameter = torch.nn.Parameter(torch.zeros(nbytes // 4))
            server = ParameterServer(
                [parameter], torch.optim.SGD, workers=WORKERS, name=f"size {number}", lr=LR
            )
            server.serve()
        else:
            found[nbytes] = time_steps(nbytes, f"size {number}", rounds, workers, gloo)
        dist.barrier()
    rpc.shutdown()
    return found


def time_steps(
    nbytes: int, name: str, rounds: int, workers: dist.ProcessGroup, gloo: dist.ProcessGroup
) -> Moments:
    count = nbytes // 4
    parameters = {
        line: torch.nn.Parameter(torch.zeros(count)) for line in (OURS, RPC, REDUCE, REDUCE_GLOO)
    }
    worker = Worker([parameters[OURS]], name=name)
    gradient = torch.full((count,), float(dist.get_rank()))

    def by_server() -> None:
        parameters[OURS].grad = gradient
        worker.step()

    def by_rpc() -> None:
        with torch.no_grad():
            parameters[RPC].copy_(rpc.rpc_sync("rank0", update, (gradient,)))

    lines: dict[str, Callable[[], None]] = {
        OURS: by_server,
        RPC: by_rpc,
        REDUCE: step_alone(parameters[REDUCE], gradient, workers),
        REDUCE_GLOO: step_alone(parameters[REDUCE_GLOO], gradient, gloo),
    }
    turns = {line: partial(spanned, step, workers) for line, step in lines.items()}
    moments = take_turns(turns, rounds, WARM_UP, rotates=True)
    for line, parameter in parameters.items():
        assert torch.equal(parameter, parameters[REDUCE]), f"{line} has other weights"
    worker.close()
    return moments


def step_alone(
    parameter: torch.nn.Parameter, gradient: Tensor, group: dist.ProcessGroup
) -> Callable[[], None]:
    optimizer = torch.optim.SGD([parameter], lr=LR)
    reduced = dreamcomm.empty(gradient.numel(), dtype=gradient.dtype)

    def step() -> None:
        reduced.copy_(gradient)
        dist.all_reduce(reduced, group=group)
        parameter.grad = reduced.div_(WORKERS)
        optimizer.step()

    return step


def measure(sizes: list[int], rounds: int, beside: int) -> list[Line]:
    with busy_processes(beside):
        _, *workers = dreamcomm.spawn(run_rank, WORKERS + 1, args=(sizes, rounds))
    return [
        Line(name, nbytes, beside, 1e3 * median(seconds), 1e3 * percentile(seconds, 90))
        for nbytes in sizes
        for name, seconds in lasted([one[nbytes] for one in workers]).items()
    ]


def main(
    size: Annotated[
        list[int] | None, typer.Option(min=4, help="Bytes; 64 KiB to 100 MiB if not given.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each line.")] = 30,
    beside: BesideEach = None,
    json: Json = None,
) -> None:
    """Times steps; see the head of this file."""
    counts = [0, 1] if beside is None else beside
    lines = [line for count in counts for line in measure(size or [*SIZES], rounds, count)]
    measurement = Measurement(json)
    measurement.grid(
        f"A step of {WORKERS} workers: ms (p50)",
        {(one.name, sized(one.nbytes, one.beside)): f"{one.p50_ms:,.2f}" for one in lines},
    )
    measurement.write(rounds=rounds, lines=[asdict(one) for one in lines])


if __name__ == "__main__":
    typer.run(main)
