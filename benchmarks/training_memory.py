"""Measures the memory of a training step: of the bare model, and under each wrapper.

    python benchmarks/training_memory.py --json memory.json

Each variant runs in processes of its own. A rank's memory is its proportional share (PSS of
/proc/self/smaps_rollup): pages that ranks share count once in all. It is taken at the end of
backward, when all gradients are there, and at the end of the step, in the last of some steps; the
larger one is reported, less what the process had before the model was made.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

import dreamcomm
from dreamcomm.tools.bench.measurement import Json, Measurement, World, chosen
from models import MODELS
from step_memory import growth_of
from training_variants import DREAMCOMM, GLOO, OWN, PLAIN

VARIANTS = (PLAIN, GLOO, DREAMCOMM, OWN)


@dataclass(frozen=True)
class Memory:
    """Bytes of all ranks together."""

    model: str
    variant: str
    world: int
    peak: int
    parameters: int
    largest_gradient: int
    over_plain: float


def pss() -> int:
    """Bytes of this process, shared pages by its share of them."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    assert found is not None
    return 1024 * int(found[1])


def run_rank(model: str, variant: str) -> tuple[int, int, int]:
    """The peak of memory, and the bytes of the parameters and of the largest one."""
    found, trainer = growth_of(model, "ddp", variant, pss)
    sizes = [weight.nbytes for weight in trainer.task.model.parameters()]
    return max(found[-2:]), sum(sizes), max(sizes)


def main(
    model: Annotated[str, typer.Option(help="mlp, gpt or small.")] = "mlp",
    world: World = 2,
    json: Json = None,
) -> None:
    """Measures the memory of a step; see the head of this file."""
    chosen([model], MODELS, "--model")
    found: list[Memory] = []
    for variant in VARIANTS:
        ranks = dreamcomm.spawn(run_rank, world, args=(model, variant))
        peak = sum(rank[0] for rank in ranks)
        plain = found[0].peak if found else peak
        found.append(Memory(model, variant, world, peak, *ranks[0][1:], peak / plain))
    measurement = Measurement(json)
    measurement.table(
        f"{model}, {world} ranks: peak memory of a step, all ranks together",
        ("", "MiB", "over plain"),
        ((one.variant, f"{one.peak / 2**20:.1f}", f"{one.over_plain:.3f}") for one in found),
    )
    measurement.write(training_memory=[asdict(one) for one in found])


if __name__ == "__main__":
    typer.run(main)
