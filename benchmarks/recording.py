"""The cost of a log, or of a trace: calls of the bare core with it and without.

    python benchmarks/recording.py
    python benchmarks/recording.py --rounds 100 --json recording.json

The three take turns, round by round, in one run of the same two processes. A round's figure is the
median of its calls; a cost is the median, over the rounds, of the difference to the plain group in
the same round, as a virtual machine's cores are near each other at one moment and not at another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import dreamcomm
from dreamcomm import _C
from dreamcomm._torch.groups import backend_of
from dreamcomm.tools.bench.measurement import Json, Measurement
from dreamcomm.tools.bench.turns import take_turns

SIZES = (1 << 10, 4 << 10, 32 << 10)
CALLS = 8  # of a burst
PLAIN, LOG, TRACE = "plain", "log", "trace"
Nanoseconds = dict[str, list[float]]


def run_rank(rounds: int, samples: int) -> dict[int, Nanoseconds]:
    """For each size the medians of all rounds, by kind of recording."""
    plain, logged = (dist.new_group(backend="dreamcomm") for _ in range(2))
    recorder = backend_of(logged)._recorder
    assert recorder is not None
    recorder.open_log(2000)

    def once(group: Any, rows: torch.Tensor) -> float:
        return median(backend_of(group)._time_core("all_reduce", rows, rows, samples)) * 1e9

    def traced(rows: torch.Tensor) -> float:
        _C.start_trace("", 2000, 8000)
        try:
            return once(plain, rows)
        finally:
            _C.stop_trace()

    kinds: dict[str, Callable[[torch.Tensor], float]] = {
        PLAIN: lambda rows: once(plain, rows),
        LOG: lambda rows: once(logged, rows),
        TRACE: traced,
    }
    found = {}
    for size in SIZES:
        rows = torch.ones(CALLS, size // 4)
        turns = {name: partial(measure, rows) for name, measure in kinds.items()}
        found[size] = take_turns(turns, rounds, warm_up=1)
    return found


def cost(taken: Nanoseconds, name: str) -> float:
    """Nanoseconds of a call beyond the plain one."""
    return median(b - a for a, b in zip(taken[PLAIN], taken[name], strict=True))


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Turns of each at every size.")] = 60,
    samples: Annotated[int, typer.Option(min=5, help="Bursts of a turn.")] = 100,
    json: Json = None,
) -> None:
    """Times small calls with and without notes; see the head of this file."""
    found = dreamcomm.spawn(run_rank, 2, args=(rounds, samples))[0]
    costs = {
        str(size): {PLAIN: median(taken[PLAIN])} | {n: cost(taken, n) for n in (LOG, TRACE)}
        for size, taken in found.items()
    }
    measurement = Measurement(json)
    measurement.table(
        "all_reduce on the bare core, 2 ranks: ns of a call (p50)",
        ("bytes", "plain", "log: more", "trace: more"),
        (
            (f"{int(size):,}", f"{one[PLAIN]:.0f}", f"{one[LOG]:+.0f}", f"{one[TRACE]:+.0f}")
            for size, one in costs.items()
        ),
        names=0,
    )
    measurement.write(rounds=rounds, nanoseconds=costs)


if __name__ == "__main__":
    typer.run(main)
