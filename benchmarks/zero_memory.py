"""Measures the memory of ZeRO's stages beside what zero.estimate plans.

    MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_MMAP_THRESHOLD_=1000000000 \\
        python benchmarks/zero_memory.py --json memory.json

Each variant runs in processes of its own. A rank's memory is what its process has more than before
the model was made: its own pages (RssAnon), and its share of those that ranks share (Pss_Shmem). It
is taken before and after each of some steps with AdamW. The largest counts, averaged over the
ranks. With the variables malloc gives nothing back by itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import mean
from typing import Annotated

import torch
import typer

import dreamcomm
from dreamcomm.tools.bench.measurement import Json, Measurement, World, chosen
from dreamcomm.zero import estimate, process_memory
from models import MODELS
from step_memory import growth_of
from training_variants import OWN, PLAIN, REDUNDANCY, ZERO_1, ZERO_2, ZERO_3

# The stage whose plan a variant is compared with. torch's ZeRO keeps all gradients, as stage 1.
STAGES = {PLAIN: 0, OWN: 0, REDUNDANCY: 1, ZERO_1: 1, ZERO_2: 2, ZERO_3: 3}


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank, averaged over the ranks."""

    model: str
    variant: str
    world: int
    planned: int
    measured: float
    over_planned: float


def warm_up() -> None:
    """Has torch allocate what it keeps: buffers of its arithmetic, threads, modules."""
    weight = torch.randn(256, 256, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    (torch.randn(8, 256) @ weight).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def run_rank(world: int, model: str, variant: str) -> tuple[int, int]:
    """The largest growth of this process, and the planned bytes."""
    found, trainer = growth_of(model, "zero", variant, process_memory, warm_up)
    return max(found), estimate(trainer.task.model, world, STAGES[variant]).peak


def main(
    model: Annotated[str, typer.Option(help="mlp, gpt or small.")] = "mlp",
    world: World = 2,
    json: Json = None,
) -> None:
    """Measures the memory of ZeRO; see the head of this file."""
    chosen([model], MODELS, "--model")
    found: list[Memory] = []
    for variant in STAGES:
        ranks = dreamcomm.spawn(run_rank, world, args=(world, model, variant))
        measured, planned = mean(rank[0] for rank in ranks), ranks[0][1]
        found.append(Memory(model, variant, world, planned, measured, measured / planned))
    measurement = Measurement(json)
    measurement.table(
        f"{model}, {world} ranks: memory of a rank with AdamW",
        ("", "planned MB", "measured MB", "over planned"),
        (
            (
                one.variant,
                f"{one.planned / 1e6:.1f}",
                f"{one.measured / 1e6:.1f}",
                f"{one.over_planned:.3f}",
            )
            for one in found
        ),
    )
    measurement.write(zero_memory=[asdict(one) for one in found])


if __name__ == "__main__":
    typer.run(main)
