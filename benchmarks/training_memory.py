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

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import dreamcomm
from machine import check_output, describe_machine, write_json
from models import MODELS, make_task
from training_variants import DREAMCOMM, GLOO, OWN, PLAIN, Trainer

VARIANTS = (PLAIN, GLOO, DREAMCOMM, OWN)
STEPS = 5


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
    torch.set_num_threads(1)
    world = dist.group.WORLD
    assert world is not None
    groups = {DREAMCOMM: world, GLOO: dist.new_group(backend="gloo")}
    dist.barrier()
    before = pss()
    trainer = Trainer(make_task(model, dist.get_rank()), "ddp", variant, groups)
    peaks: list[int] = []

    def look(*_: object) -> None:
        dist.barrier()
        peaks.append(pss() - before)
        dist.barrier()

    trainer.optimizer.register_step_pre_hook(look)
    trainer.optimizer.register_step_post_hook(look)
    for _ in range(STEPS):
        peaks.clear()
        trainer.step()
    sizes = [weight.nbytes for weight in trainer.task.model.parameters()]
    return max(peaks), sum(sizes), max(sizes)


def main(
    model: Annotated[str, typer.Option(help="mlp, gpt or small.")] = "mlp",
    world: Annotated[int, typer.Option(min=1, max=16, help="Ranks.")] = 2,
    json: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
) -> None:
    """Measures the memory of a step; see the head of this file."""
    check_output(json)
    if model not in MODELS:
        raise typer.BadParameter(f"expected one of {', '.join(MODELS)}", param_hint="--model")
    found: list[Memory] = []
    table = Table(title=f"{model}, {world} ranks: peak memory of a step, all ranks together")
    for heading in ("", "MiB", "over plain"):
        table.add_column(heading, justify="right")
    for variant in VARIANTS:
        ranks = dreamcomm.spawn(run_rank, world, args=(model, variant))
        peak = sum(rank[0] for rank in ranks)
        plain = found[0].peak if found else peak
        found.append(Memory(model, variant, world, peak, *ranks[0][1:], peak / plain))
        table.add_row(variant, f"{peak / 2**20:.1f}", f"{peak / plain:.3f}")
    Console().print(table)
    if json is not None:
        rows = [asdict(one) for one in found]
        write_json(json, {"machine": describe_machine(), "training_memory": rows})


if __name__ == "__main__":
    typer.run(main)
