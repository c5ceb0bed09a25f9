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
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import dreamcomm
from dreamcomm.zero import estimate, process_memory
from machine import check_output, describe_machine, write_json
from models import MODELS, make_task
from training_variants import DREAMCOMM, GLOO, OWN, PLAIN, REDUNDANCY, ZERO_1, ZERO_2, Trainer

# The stage whose plan a variant is compared with. torch's ZeRO keeps all gradients, as stage 1.
STAGES = {PLAIN: 0, OWN: 0, REDUNDANCY: 1, ZERO_1: 1, ZERO_2: 2}
STEPS = 5


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


def run_rank(model: str, variant: str) -> tuple[int, int]:
    """The largest growth of this process, and the planned bytes."""
    torch.set_num_threads(1)
    world = dist.group.WORLD
    assert world is not None
    groups = {DREAMCOMM: world, GLOO: dist.new_group(backend="gloo")}
    warm_up()
    dist.barrier()
    before = process_memory()
    trainer = Trainer(make_task(model, dist.get_rank()), "zero", variant, groups)
    peaks: list[int] = []

    def look(*_: object) -> None:
        dist.barrier()
        peaks.append(process_memory() - before)
        dist.barrier()

    trainer.optimizer.register_step_pre_hook(look)
    trainer.optimizer.register_step_post_hook(look)
    for _ in range(STEPS):
        trainer.step()
    stage = STAGES[variant]
    return max(peaks), estimate(trainer.task.model, dist.get_world_size(), stage).peak


def main(
    model: Annotated[str, typer.Option(help="mlp, gpt or small.")] = "mlp",
    world: Annotated[int, typer.Option(min=1, max=16, help="Ranks.")] = 2,
    json: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
) -> None:
    """Measures the memory of ZeRO; see the head of this file."""
    check_output(json)
    if model not in MODELS:
        raise typer.BadParameter(f"expected one of {', '.join(MODELS)}", param_hint="--model")
    found: list[Memory] = []
    table = Table(title=f"{model}, {world} ranks: memory of a rank with AdamW")
    for heading in ("", "planned MB", "measured MB", "over planned"):
        table.add_column(heading, justify="right")
    for variant in STAGES:
        ranks = dreamcomm.spawn(run_rank, world, args=(model, variant))
        measured, planned = mean(rank[0] for rank in ranks), ranks[0][1]
        found.append(Memory(model, variant, world, planned, measured, measured / planned))
        table.add_row(
            variant, f"{planned / 1e6:.1f}", f"{measured / 1e6:.1f}", f"{measured / planned:.3f}"
        )
    Console().print(table)
    if json is not None:
        rows = [asdict(one) for one in found]
        write_json(json, {"machine": describe_machine(), "zero_memory": rows})


if __name__ == "__main__":
    typer.run(main)
