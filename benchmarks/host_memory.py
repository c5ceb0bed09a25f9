"""Measures what all ranks of a host take together, where each parameter lies there once or not.

    MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_MMAP_THRESHOLD_=1000000000 \\
        python benchmarks/host_memory.py --world 2 --json host.json

The ranks join a control group of their own, whose peak counts each page once. It needs root, or a
folder of control groups that this user may write. A rank's modules and buffers of torch are there
before the model is made, and do not count. AdamW, fused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

import dreamcomm
from dreamcomm.tools.bench.measurement import Json, Measurement, World, chosen
from dreamcomm.zero import estimate
from models import MODELS, make_task
from training_variants import DREAMCOMM, GLOO, ZERO_3, ZERO_3_TORCH, make_groups, make_trainer
from zero_memory import warm_up

STEPS = 5
VARIANTS = (GLOO, DREAMCOMM, ZERO_3, ZERO_3_TORCH)
ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # of version 1, and 2


@dataclass(frozen=True)
class HostMemory:
    """Bytes of all ranks together, at the peak of some steps."""

    model: str
    variant: str
    world: int
    peak: int
    planned: int  # of stage 3, with one copy of the parameters


@contextmanager
def control_group() -> Iterator[Path]:
    root = next(one for one in ROOTS if (one / "cgroup.procs").exists())
    path = root / f"dreamcomm-benchmark-{os.getpid()}"
    path.mkdir()
    try:
        yield path
    finally:
        path.rmdir()  # its processes have ended


def peak_file(group: Path) -> Path:
    old = group / "memory.max_usage_in_bytes"
    return old if old.exists() else group / "memory.peak"


def usage(group: Path) -> int:
    old = group / "memory.usage_in_bytes"
    return int((old if old.exists() else group / "memory.current").read_text())


def run_rank(group: str, model: str, variant: str) -> tuple[int, int]:
    """The group's growth at its peak, and the planned bytes of all ranks."""
    place = Path(group)
    torch.set_num_threads(1)
    groups = make_groups()
    (place / "cgroup.procs").write_text(str(os.getpid()))
    warm_up()
    dist.barrier()
    before = usage(place)
    dist.barrier()
    trainer = make_trainer(make_task(model, dist.get_rank()), "zero3-adamw", variant, groups)
    for _ in range(STEPS):
        trainer.step()
    dist.barrier()
    grown = int(peak_file(place).read_text()) - before
    world = dist.get_world_size()
    planned = sum(
        estimate(make_task(model, 0).model, world, 3, rank=rank).peak for rank in range(world)
    )
    return grown, planned


def main(
    model: Annotated[str, typer.Option(help="mlp or gpt.")] = "mlp",
    world: World = 2,
    json: Json = None,
) -> None:
    """Measures the memory of a host; see the head of this file."""
    chosen([model], MODELS, "--model")
    found = []
    for variant in VARIANTS:
        with control_group() as group:
            peak, planned = dreamcomm.spawn(run_rank, world, args=(str(group), model, variant))[0]
        found.append(HostMemory(model, variant, world, peak, planned))
    theirs = next(one.peak for one in found if one.variant == DREAMCOMM)
    measurement = Measurement(json)
    measurement.table(
        f"{model}, {world} ranks: memory of the host with AdamW",
        ("", "peak MB", "planned MB", "of FSDP2's"),
        (
            (
                one.variant,
                f"{one.peak / 1e6:.1f}",
                f"{one.planned / 1e6:.1f}" if one.variant in (ZERO_3, ZERO_3_TORCH) else "",
                f"{one.peak / theirs:.3f}",
            )
            for one in found
        ),
    )
    measurement.write(host_memory=[asdict(one) for one in found])


if __name__ == "__main__":
    typer.run(main)
