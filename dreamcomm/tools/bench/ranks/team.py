"""The groups of a run in one rank, and the agreements between the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import dreamcomm
from dreamcomm._torch.groups import backend_of
from dreamcomm.tools.bench.gpus import device_of, why_not_carried
from dreamcomm.tools.bench.room import available_memory


class Team:
    """dreamcomm's group (the default one), the other backend's, and one for agreements."""

    def __init__(self, versus: str | None) -> None:
        assert dist.group.WORLD is not None
        self.dream = dist.group.WORLD
        self.backend = backend_of(self.dream)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # A separate group, so that the measured groups are not used to measure.
        self.control = dist.new_group(backend="gloo")
        self.versus = versus
        self.other = None if versus is None else dist.new_group(backend=versus)
        self.device = device_of(versus)
        if self.device == "cuda":
            local = int(os.environ.get("LOCAL_RANK", self.rank))
            torch.cuda.set_device(local % torch.cuda.device_count())

    @property
    def settle(self) -> Callable[[], object] | None:
        """Waits until the device is done; nothing to wait for on the CPU."""
        return torch.cuda.synchronize if self.device == "cuda" else None

    def private(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(rows, columns, dtype=dtype, device=self.device)

    def heap(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory in the shared heap, or registered on the GPU. Raises MemoryError if it is full.

        That of a GPU is the group's: all ranks have to call this.
        """
        made = dreamcomm.empty(rows, columns, dtype=dtype, device=self.device)
        if not dreamcomm.is_shared(made):
            of = "CUDA_HEAP" if self.device == "cuda" else "HEAP"
            raise MemoryError(f"the heap is full: set DREAMCOMM_{of}_BYTES to a larger size")
        return made

    def available(self) -> int:
        """Bytes available for the tensors of all ranks, on the device of the run's tensors."""
        if self.device == "cpu":
            return available_memory()
        return self.world * torch.cuda.mem_get_info()[0]

    def not_carried(self) -> str | None:
        """The reason that dreamcomm itself does not carry the tensors, or None; on every rank.

        A first call on GPUs bootstraps the group. Without this check, torch's NCCL could be
        measured as dreamcomm.
        """
        if self.device == "cpu":
            return None
        dist.all_reduce(torch.ones(1, device=self.device))
        return self.first_problem(why_not_carried(dreamcomm.explain("all_reduce", 4)))

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def first_problem(self, problem: str | None) -> str | None:
        """The problem of the lowest rank that has one, on every rank."""
        return next((found for found in self.gather(problem) if found is not None), None)
