"""Times a pipeline's messages, and a step whose stages compute next to nothing, beside torch's.

    python benchmarks/pipeline_messages.py --json messages.json        # 3 minutes
    python benchmarks/pipeline_messages.py --rounds 3 --size 65536
    python benchmarks/pipeline_messages.py --beside 0                  # no busy process

Two ranks. All lines of a size take turns in one run of the same processes, and a turn's order
rotates. Everything is measured twice: with no other program, and beside busy processes.

Steps: 1F1B of 8 micro-batches through two stages that add a scalar parameter, with a mean as loss.
One rank's step alone is the same computation in one process, without messages and without a runner.
A step lasts from the first rank's begin to the last rank's end.

Messages: the time from the call of a send to the end of the receive, by the clock that both
processes share. The ranks send in turns, and the receiver already waits. The sender writes the
tensor before, outside of the time. So no copy of it is in the receiver's caches, as after a
computation. A pipeline's message includes its header and the memory into which it is received. The
header's cost is the difference to a raw message that is received into memory of the heap, as a
pipeline's are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import dreamcomm
from dreamcomm.pipeline import Pipeline
from dreamcomm.pipeline.messages.channel import Channel
from dreamcomm.pipeline.messages.key import Key, Slot
from dreamcomm.tools.bench.busy import busy_processes
from machine import check_output, describe_machine, write_json

SIZES = (1 << 10, 64 << 10, 1 << 20, 8 << 20)
MICROBATCHES, ROWS = 8, 128
TAG = 1 << 20
GOAL_BYTES = 64 << 10
FASTER, HEADER_US = 3.0, 20.0  # goals at that size

# Steps.
OURS = "dreamcomm's pipeline"
TORCH_DREAMCOMM, TORCH_GLOO = "torch's on dreamcomm", "torch's on gloo"
ALONE = "one process"
# Messages.
CHANNEL = "pipeline's message"
RAW, RAW_HEAP = "send, recv", "send, recv into the heap"
GLOO, GLOO_BATCH = "gloo: send, recv", "gloo: batch_isend_irecv"

# By a line's name: begin and end of each step, or of each message the call and the arrival.
Moments = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Line:
    """The median of one line at one size, beside so many busy processes."""

    name: str
    nbytes: int
    beside: int
    p50_us: float
    p90_us: float


@dataclass(frozen=True)
class Comparison:
    """What the lines of a size say. Ratios above one: ours is faster.

    Attributes:
        header_us: how much longer a pipeline's message takes than a raw one.
    """

    nbytes: int
    beside: int
    step_torch_dreamcomm_over_ours: float
    step_torch_gloo_over_ours: float
    message_gloo_over_ours: float
    header_us: float


class Shift(nn.Module):
    """Adds a parameter. Its backward passes the gradient on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def loss_fn(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


# Steps.


def steps_of(nbytes: int, gloo: dist.ProcessGroup) -> dict[str, Callable[[], Any]]:
    """What runs a step of each line on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = torch.randn(MICROBATCHES * ROWS, nbytes // 4 // ROWS or 1)
    target = torch.zeros(MICROBATCHES)
    pipe = Pipeline([Shift() for _ in range(world)], MICROBATCHES, loss_fn=loss_fn)

    def torchs(group: dist.ProcessGroup | None) -> Callable[[], Any]:
        stage = PipelineStage(Shift(), rank, world, torch.device("cpu"), group=group)
        runner = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)

        def step() -> None:
            if rank == 0:
                runner.step(batch, return_outputs=False)
            else:
                runner.step(target=target, losses=[], return_outputs=False)

        return step

    whole = nn.Sequential(*(Shift() for _ in range(world)))

    def alone() -> None:
        if rank == 0:
            for one in batch.chunk(MICROBATCHES):
                (loss_fn(whole(one), target) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]

    return {
        OURS: lambda: pipe.step(batch, target=target, return_outputs=False),
        TORCH_DREAMCOMM: torchs(dist.group.WORLD),
        TORCH_GLOO: torchs(gloo),
        ALONE: alone,
    }


def time_steps(nbytes: int, gloo: dist.ProcessGroup, rounds: int) -> Moments:
    steps = steps_of(nbytes, gloo)
    names = list(steps)
    moments: Moments = {name: [] for name in names}
    for number in range(rounds + 3):
        for name in _rotated(names, number):
            dist.barrier()
            begin = time.perf_counter()
            steps[name]()
            if number >= 3:
                moments[name].append((begin, time.perf_counter()))
    return moments


# Messages. A way sends or receives one tensor.


class Ways:
    """The ways to send a tensor of one size to the other rank, and to receive one."""

    def __init__(self, nbytes: int, gloo: dist.ProcessGroup) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._peer, self._gloo = 1 - dist.get_rank(), gloo
        shape = (ROWS, nbytes // 4 // ROWS or 1)
        self.tensor = torch.zeros(shape)
        self._private, self._heap = torch.zeros(shape), dreamcomm.zeros(shape)
        self._channel, self._number = Channel(world, TAG), 0
        self._channel.begin(1, 1)

    def close(self) -> None:
        self._channel.drain()
        self._channel.end()

    def lines(self) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
        """The send and the receive of each line."""
        peer, gloo = self._peer, self._gloo
        return {
            CHANNEL: (self._channel_send, self._channel_receive),
            RAW: (
                lambda: dist.send(self.tensor, peer),
                lambda: dist.recv(self._private, peer),
            ),
            RAW_HEAP: (
                lambda: dist.send(self.tensor, peer),
                lambda: dist.recv(self._heap, peer),
            ),
            GLOO: (
                lambda: dist.send(self.tensor, peer, group=gloo),
                lambda: dist.recv(self._private, peer, group=gloo),
            ),
            GLOO_BATCH: (
                lambda: self._batch(dist.isend, self.tensor),
                lambda: self._batch(dist.irecv, self._private),
            ),
        }

    def _channel_send(self) -> None:
        self._channel.send(self._peer, self._key(), self.tensor)

    def _channel_receive(self) -> None:
        self._channel.receive(self._peer, self._key())

    def _key(self) -> Key:
        self._number += 1
        return Key(1, Slot.FORWARD, 0, self._number)

    def _batch(self, operation: Any, tensor: Tensor) -> None:
        operations = [dist.P2POp(operation, tensor, self._peer, self._gloo)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def time_messages(nbytes: int, gloo: dist.ProcessGroup, rounds: int, calls: int) -> Moments:
    """The moments at which this rank has called a send, and at which a message has arrived."""
    ways = Ways(nbytes, gloo)
    lines = ways.lines()
    moments: Moments = {name: [] for name in lines}
    for number in range(rounds + 1):
        for name in _rotated(list(lines), number):
            dist.barrier()
            found = ping_pong(ways.tensor, *lines[name], calls)
            if number >= 1:
                moments[name] += found
    ways.close()
    return moments


def ping_pong(
    tensor: Tensor, send: Callable[[], Any], receive: Callable[[], Any], calls: int
) -> list[tuple[float, float]]:
    found = []
    for number in range(calls):
        called = arrived = 0.0
        for sender in (0, 1):
            if sender == dist.get_rank():
                tensor.fill_(number)
                called = time.perf_counter()
                send()
            else:
                receive()
                arrived = time.perf_counter()
        found.append((called, arrived))
    return found


def _rotated(names: list[str], number: int) -> list[str]:
    first = number % len(names)
    return names[first:] + names[:first]


# The report.


def run_rank(sizes: list[int], rounds: int, calls: int) -> dict[int, tuple[Moments, Moments]]:
    torch.set_num_threads(1)
    gloo = dist.new_group(backend="gloo")
    return {
        nbytes: (
            time_steps(nbytes, gloo, rounds),
            # As many bytes a turn as 16 MiB, if that is fewer calls.
            time_messages(nbytes, gloo, rounds, min(calls, max(2, (16 << 20) // nbytes))),
        )
        for nbytes in sizes
    }


def measure(
    sizes: list[int], rounds: int, calls: int, beside: int
) -> tuple[list[Line], list[Comparison]]:
    with busy_processes(beside):
        first, second = dreamcomm.spawn(run_rank, 2, args=(sizes, rounds, calls))
    lines, comparisons = [], []
    for nbytes in sizes:
        seconds = step_seconds(first[nbytes][0], second[nbytes][0])
        seconds |= message_seconds(first[nbytes][1], second[nbytes][1])
        lines += [line_of(name, nbytes, beside, times) for name, times in seconds.items()]
        comparisons.append(compare(nbytes, beside, seconds))
    return lines, comparisons


def step_seconds(first: Moments, second: Moments) -> dict[str, list[float]]:
    """A step is over when the last rank has ended it."""
    return {
        name: [
            max(a[1], b[1]) - min(a[0], b[0])
            for a, b in zip(first[name], second[name], strict=True)
        ]
        for name in first
    }


def message_seconds(first: Moments, second: Moments) -> dict[str, list[float]]:
    """The messages of both directions."""
    return {
        name: [
            arrived - called
            for one, other in zip(first[name], second[name], strict=True)
            for called, arrived in ((one[0], other[1]), (other[0], one[1]))
        ]
        for name in first
    }


def line_of(name: str, nbytes: int, beside: int, seconds: list[float]) -> Line:
    ninth = sorted(seconds)[len(seconds) * 9 // 10]
    return Line(name, nbytes, beside, 1e6 * median(seconds), 1e6 * ninth)


def compare(nbytes: int, beside: int, seconds: dict[str, list[float]]) -> Comparison:
    middle = {name: median(times) for name, times in seconds.items()}
    return Comparison(
        nbytes,
        beside,
        middle[TORCH_DREAMCOMM] / middle[OURS],
        middle[TORCH_GLOO] / middle[OURS],
        min(middle[GLOO], middle[GLOO_BATCH]) / middle[CHANNEL],
        1e6 * (middle[CHANNEL] - middle[RAW_HEAP]),
    )


def print_lines(console: Console, lines: list[Line], sizes: list[int]) -> None:
    columns = list(dict.fromkeys(line.beside for line in lines))
    table = Table(title="Steps of 8 micro-batches, and messages, 2 ranks: us (p50)")
    table.add_column("", no_wrap=True)
    for nbytes in sizes:
        for beside in columns:
            heading = f"{nbytes:,} B" + (f"\n+ {beside} busy" if beside else "")
            table.add_column(heading, justify="right", no_wrap=True)
    for name in dict.fromkeys(line.name for line in lines):
        found = {(one.nbytes, one.beside): one.p50_us for one in lines if one.name == name}
        table.add_row(name, *(f"{found[size, n]:,.1f}" for size in sizes for n in columns))
    console.print(table)


def print_comparisons(console: Console, comparisons: list[Comparison]) -> None:
    table = Table(title=f"Goals at {GOAL_BYTES:,} B: gloo {FASTER:g} x, header {HEADER_US:g} us")
    for heading in (
        "bytes",
        "busy processes",
        "step: torch on dreamcomm / ours",
        "step: torch on gloo / ours",
        "message: gloo / ours",
        "header us",
    ):
        table.add_column(heading, justify="right")
    for one in comparisons:
        ratios = (
            one.step_torch_dreamcomm_over_ours,
            one.step_torch_gloo_over_ours,
            one.message_gloo_over_ours,
        )
        table.add_row(
            f"{one.nbytes:,}",
            str(one.beside),
            *(f"{ratio:.2f}" for ratio in ratios),
            f"{one.header_us:+.1f}",
        )
    console.print(table)


def main(
    size: Annotated[
        list[int] | None, typer.Option(min=512, help="Bytes; 1 KiB to 8 MiB if not given.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each line.")] = 30,
    calls: Annotated[int, typer.Option(min=1, help="Messages each way in a turn, at most.")] = 50,
    beside: Annotated[
        list[int] | None, typer.Option(min=0, help="Busy processes; 0 and 1 if not given.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
) -> None:
    """Times messages and steps; see the head of this file."""
    check_output(json)
    console = Console(width=None if Console().is_terminal else 160)
    sizes = size or list(SIZES)
    lines: list[Line] = []
    comparisons: list[Comparison] = []
    for count in [0, 1] if beside is None else beside:
        found = measure(sizes, rounds, calls, count)
        lines += found[0]
        comparisons += found[1]
    print_lines(console, lines, sizes)
    print_comparisons(console, comparisons)
    if json is not None:
        write_json(
            json,
            {
                "machine": describe_machine(),
                "rounds": rounds,
                "microbatches": MICROBATCHES,
                "lines": [asdict(one) for one in lines],
                "comparisons": [asdict(one) for one in comparisons],
            },
        )


if __name__ == "__main__":
    typer.run(main)
