"""Runs with tensors on GPUs, against a backend that takes only those."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

import dreamcomm

if TYPE_CHECKING:
    from dreamcomm.tools.bench.cases import Case, Grid

ALIGNMENT = 1 << 20  # bytes for the alignment of a case's tensors, more than enough
CARRIED = re.compile(r"\(tensors on cuda: GPU kernels")
TOLD = re.compile(r"\(tensors on cuda: (.*?)(; what it does not do goes to |; sparse |\)$|$)", re.M)


def device_of(versus: str | None) -> str:
    """The device type of a run's tensors; NCCL takes only tensors on GPUs."""
    return "cuda" if versus == "nccl" else "cpu"


def on_gpus(grids: list[Grid]) -> list[Grid]:
    """The grids without the parts that exist for CPU tensors only.

    Raises:
        ValueError: nothing is left of a grid.
    """
    if any("dist" not in grid.layers for grid in grids):
        raise ValueError("tensors on GPUs are timed through the layer dist only")
    return [replace(grid, layers=("dist",)) for grid in grids]


def check_gpus(cases: Sequence[Case]) -> None:
    """Raises ValueError where ranks would share a GPU, which NCCL refuses."""
    there = torch.cuda.device_count()
    for case in cases:
        if case.world > there:
            raise ValueError(
                f"NCCL takes a GPU for each rank: a case asks for {case.world} ranks, and this "
                f"machine has {there} GPUs"
            )


def options_for(cases: Sequence[Case], versus: str | None) -> dreamcomm.Options | None:
    """The options by which dreamcomm's own kernels carry tensors on GPUs."""
    if device_of(versus) == "cpu":
        return None
    return dreamcomm.Options(cuda="dreamcomm", cuda_heap_bytes=registered_bytes(cases))


def registered_bytes(cases: Sequence[Case]) -> int:
    """Registered memory for every case; the last one's may be in use when the next begins."""
    sizes = [case.tensor_bytes() for case in cases if case.placement == "heap"]
    return 2 * (max(sizes) + ALIGNMENT) if sizes else 0


def why_not_carried(explained: str) -> str | None:
    """The reason in explain()'s text that dreamcomm's kernels do not carry GPU tensors; or None."""
    if CARRIED.search(explained):
        return None
    told = TOLD.search(explained)
    return told[1] if told else explained.splitlines()[0]
