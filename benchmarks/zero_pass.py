"""Times the passes of ZeRO over memory alone, beside a memory probe.

    python benchmarks/zero_pass.py --json pass.json

Ranks have gradients of the MLP in shared memory, and step with AdamW and SGD: stage 1 in one pass,
stage 2 in a reduction and a step. The bytes are those that the definition has: of each parameter
gradients that are read, parameters, state that are read and written. The probe moves bytes at the
same time on all ranks, in memory of each rank's own, by the kernel of SGD with momentum: five
streams, and next to no arithmetic. All take turns in one run; a turn lasts until the last rank has
finished. Reported are medians.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import dreamcomm
from dreamcomm import _C
from dreamcomm.tools.bench.measurement import Json, Measurement, World
from dreamcomm.tools.bench.turns import slowest, take_turns, timed
from dreamcomm.zero import ZeroOptimizer
from models import make_task

PROBE = "memory probe"
# Bytes an element of state that a rank reads and writes, for each element it owns.
STATE = {"AdamW": 16, "AdamW, fused": 16, "SGD with momentum": 8}


@dataclass(frozen=True)
class Pass:
    """All ranks together."""

    name: str
    world: int
    nbytes: int
    p50_ms: float
    gigabytes_per_second: float
    of_probe: float


def make_optimizer(kind: str, stage: int) -> ZeroOptimizer:
    model = make_task("mlp", dist.get_rank()).model
    if kind == "SGD with momentum":
        optimizer = ZeroOptimizer(
            model.parameters(), torch.optim.SGD, stage=stage, lr=1e-6, momentum=0.9
        )
    else:
        optimizer = ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, stage=stage, lr=1e-6, fused="fused" in kind
        )
    for parameter in model.parameters():
        parameter.grad = dreamcomm.zeros(parameter.shape).normal_()
    return optimizer


def passes() -> dict[str, tuple[int, Callable[[], Any]]]:
    """What is timed, and the bytes of one rank."""
    world = dist.get_world_size()
    found: dict[str, tuple[int, Callable[[], Any]]] = {}
    for kind, state in STATE.items():
        first = make_optimizer(kind, 1)
        elements = sum(one.parameter.numel() for one in first._ordered)
        owned = elements // world
        # Of each owned element: all ranks' gradients, the parameter, state, all ranks' parameters.
        whole = owned * (4 * world + 4 + state + 4 * world)
        found[f"{kind}: stage 1"] = whole, first.step
        second = make_optimizer(kind, 2)
        gradients = [one.parameter.grad for one in second._ordered]

        def reduce(second: ZeroOptimizer = second, gradients: list[Any] = gradients) -> None:
            second.reduce_gradients()

        def refill(second: ZeroOptimizer = second, gradients: list[Any] = gradients) -> None:
            for one, gradient in zip(second._ordered, gradients, strict=True):
                one.parameter.grad = gradient

        reduce_bytes = owned * (4 * world + 4)
        step_bytes = owned * (4 + 4 + state + 4 * world)
        if kind == "AdamW":
            found["refill"] = 0, refill
            found["stage 2: reduction"] = reduce_bytes, reduce
        else:
            reduce()
        found[f"{kind}: stage 2, step"] = step_bytes, second.step
    rows = [torch.rand(owned) for _ in range(3)]
    rule = _C.SgdRule(lr=1e-6, momentum=0.9)
    found[PROBE] = 20 * owned, lambda: _C.optimizer_step(rule, rows[0], [rows[1]], rows[2])
    return found


def run_rank(rounds: int) -> tuple[dict[str, int], dict[str, list[float]]]:
    """For each pass the bytes of this rank, and its seconds."""
    torch.set_num_threads(1)
    timed_passes = passes()
    turns = {name: partial(timed, run) for name, (_, run) in timed_passes.items()}
    seconds = take_turns(turns, rounds, warm_up=3)
    nbytes = {name: nbytes for name, (nbytes, _) in timed_passes.items() if nbytes}
    return nbytes, {name: seconds[name] for name in nbytes}


def main(
    world: World = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 30,
    json: Json = None,
) -> None:
    """Times the passes of ZeRO; see the head of this file."""
    ranks = dreamcomm.spawn(run_rank, world, args=(rounds,))
    middle = {name: median(turns) for name, turns in slowest([one for _, one in ranks]).items()}
    total = {name: sum(nbytes[name] for nbytes, _ in ranks) for name in middle}
    speed = {name: total[name] / middle[name] / 1e9 for name in total}
    found = [
        Pass(name, world, total[name], 1e3 * middle[name], speed[name], speed[name] / speed[PROBE])
        for name in total
    ]
    measurement = Measurement(json)
    measurement.table(
        f"Passes over 25.2 M parameters, {world} ranks together",
        ("", "MB", "p50 ms", "GB/s", "of the probe"),
        (
            (
                one.name,
                f"{one.nbytes / 1e6:.0f}",
                f"{one.p50_ms:.1f}",
                f"{one.gigabytes_per_second:.1f}",
                f"{one.of_probe:.0%}",
            )
            for one in found
        ),
    )
    measurement.write(zero_passes=[asdict(one) for one in found])


if __name__ == "__main__":
    typer.run(main)
