"""What an optimizer's training takes of memory: as planned, and as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dreamcomm.zero.estimate import Estimate
from dreamcomm.zero.sharded_gradient import ShardedGradient
from dreamcomm.zero.shards import ShardedGroups

__all__ = ["MemoryReport", "measured", "memory_report", "process_memory"]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one rank.

    Attributes:
        planned: what :func:`estimate` gives.
        parameters, gradients, optimizer_state, master_parameters: of the tensors that there are
            now. Gradients are those that backward passes have left, and shards.
        process: growth of the process's memory; None where no beginning was given.
    """

    planned: Estimate
    parameters: int
    gradients: int
    optimizer_state: int
    master_parameters: int
    process: int | None

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.master_parameters

    def __str__(self) -> str:
        rows = [f"{'bytes of this rank':20s} {'planned':>16s} {'measured':>16s}"]
        for name in ("parameters", "gradients", "optimizer_state", "master_parameters"):
            label = name.replace("_", " ")
            rows.append(
                f"{label:20s} {getattr(self.planned, name):16,d} {getattr(self, name):16,d}"
            )
        rows.append(f"{'total':20s} {self.planned.total:16,d} {self.total:16,d}")
        if self.process is not None:
            rows.append(
                f"{'process, at its peak':20s} {self.planned.peak:16,d} {self.process:16,d}"
            )
        return "\n".join(rows)


def process_memory() -> int:
    """Bytes of this process: its own pages, and its share of those that ranks share.

    Linux only: RssAnon of /proc/self/status, and Pss_Shmem of /proc/self/smaps_rollup.
    """
    own = _kilobytes("/proc/self/status", "RssAnon")
    return 1024 * (own + _kilobytes("/proc/self/smaps_rollup", "Pss_Shmem"))


def _kilobytes(path: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} has no line {field!r}; it needs Linux 5.0 or later")
    return int(found[1])


class Reporting(Protocol):
    """What tells of its memory, such as a ZeroOptimizer."""

    def report(self, *, since: int | None = None) -> MemoryReport: ...


def memory_report(optimizer: Reporting, *, since: int | None = None) -> MemoryReport:
    """What the optimizer's parameters take on this rank. Nothing is communicated.

    Args:
        optimizer: whose parameters are counted, each once.
        since: :func:`process_memory` before the model was made.
    """
    return optimizer.report(since=since)


def measured(
    planned: Estimate,
    sharded: ShardedGroups,
    gradient_shards: Iterable[Tensor | None],
    since: int | None,
) -> MemoryReport:
    """Measures what there is now.

    Args:
        planned: beside it.
        sharded: what is counted.
        gradient_shards: this rank's, where they are kept; of DTensors all that is kept.
        since: as of :func:`memory_report`.
    """
    shards = list(sharded.shards.values())
    gradients = [one.parameter.grad for one in shards if one.parameter.grad is not None]
    local = [one for one in gradients if not isinstance(one, (ShardedGradient, DTensor))]
    state = [
        value
        for kept in sharded.inner.state.values()
        for value in kept.values()
        if isinstance(value, Tensor)
    ]
    return MemoryReport(
        planned,
        _nbytes([one.parameter for one in shards]),
        _nbytes([*local, *(one for one in gradient_shards if one is not None)]),
        _nbytes(state),
        _nbytes([one.tensor for one in shards if one.has_master]),
        None if since is None else process_memory() - since,
    )


def _nbytes(tensors: list[Tensor] | list[torch.nn.Parameter]) -> int:
    """On this rank: of a DTensor its rows."""
    return sum((one._local_tensor if isinstance(one, DTensor) else one).nbytes for one in tensors)
