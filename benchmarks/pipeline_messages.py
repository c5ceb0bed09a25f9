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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import dreamcomm
from dreamcomm.pipeline import Pipeline
from dreamcomm.pipeline.messages.channel import Channel
from dreamcomm.pipeline.messages.key import Key, Slot
from dreamcomm.tools.bench.busy import busy_processes
from dreamcomm.tools.bench.measurement import BesideEach, Json, Measurement, sized
from dreamcomm.tools.bench.statistics import percentile
from dreamcomm.tools.bench.turns import Span, lasted, spanned, take_turns, together

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
Moments = dict[str, list[Span]]


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
    turns = {name: partial(spanned, step) for name, step in steps_of(nbytes, gloo).items()}
    return take_turns(turns, rounds, warm_up=3, rotates=True)


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
    turns = {
        name: partial(ping_pong, ways.tensor, *line, calls) for name, line in ways.lines().items()
    }
    found = take_turns(turns, rounds, warm_up=1, rotates=True)
    ways.close()
    return {name: [span for turn in of_name for span in turn] for name, of_name in found.items()}


def ping_pong(
    tensor: Tensor, send: Callable[[], Any], receive: Callable[[], Any], calls: int
) -> list[Span]:
    dist.barrier()
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
        ranks = dreamcomm.spawn(run_rank, 2, args=(sizes, rounds, calls))
    lines, comparisons = [], []
    for nbytes in sizes:
        steps, messages = zip(*(rank[nbytes] for rank in ranks), strict=True)
        seconds = lasted(steps) | message_seconds(messages)
        lines += [
            Line(name, nbytes, beside, 1e6 * median(times), 1e6 * percentile(times, 90))
            for name, times in seconds.items()
        ]
        comparisons.append(compare(nbytes, beside, seconds))
    return lines, comparisons


def message_seconds(ranks: Sequence[Moments]) -> dict[str, list[float]]:
    """The messages of both directions."""
    return {
        name: [b[1] - a[0] for one, other in pairs for a, b in ((one, other), (other, one))]
        for name, pairs in together(ranks).items()
    }


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


def show_comparisons(measurement: Measurement, comparisons: list[Comparison]) -> None:
    measurement.table(
        f"Goals at {GOAL_BYTES:,} B: gloo {FASTER:g} x, header {HEADER_US:g} us",
        (
            "bytes",
            "busy processes",
            "step: torch on dreamcomm / ours",
            "step: torch on gloo / ours",
            "message: gloo / ours",
            "header us",
        ),
        (
            (
                f"{one.nbytes:,}",
                one.beside,
                f"{one.step_torch_dreamcomm_over_ours:.2f}",
                f"{one.step_torch_gloo_over_ours:.2f}",
                f"{one.message_gloo_over_ours:.2f}",
                f"{one.header_us:+.1f}",
            )
            for one in comparisons
        ),
        names=0,
    )


def main(
    size: Annotated[
        list[int] | None, typer.Option(min=512, help="Bytes; 1 KiB to 8 MiB if not given.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each line.")] = 30,
    calls: Annotated[int, typer.Option(min=1, help="Messages each way in a turn, at most.")] = 50,
    beside: BesideEach = None,
    json: Json = None,
) -> None:
    """Times messages and steps; see the head of this file."""
    lines: list[Line] = []
    comparisons: list[Comparison] = []
    for count in [0, 1] if beside is None else beside:
        found = measure(size or [*SIZES], rounds, calls, count)
        lines += found[0]
        comparisons += found[1]
    measurement = Measurement(json)
    measurement.grid(
        f"Steps of {MICROBATCHES} micro-batches, and messages, 2 ranks: us (p50)",
        {(one.name, sized(one.nbytes, one.beside)): f"{one.p50_us:,.1f}" for one in lines},
    )
    show_comparisons(measurement, comparisons)
    measurement.write(
        rounds=rounds,
        microbatches=MICROBATCHES,
        lines=[asdict(one) for one in lines],
        comparisons=[asdict(one) for one in comparisons],
    )


if __name__ == "__main__":
    typer.run(main)
