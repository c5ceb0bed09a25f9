"""What the ranks run in test_bench_runs.py: fresh interpreters import it from beside the tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import dreamcomm
from dreamcomm.tools.bench.cases import Case
from dreamcomm.tools.bench.gpus import why_not_carried
from dreamcomm.tools.bench.ranks.rank import run_rank
from dreamcomm.tools.bench.ranks.team import Team
from dreamcomm.tools.bench.result import CaseResult, Settings


def wrong_on_last_rank(cases: list[Case], settings: Settings, group: str) -> list[CaseResult]:
    """Runs the cases with an all_reduce that breaks the fourth element, once the call is done.

    ``group``: "dreamcomm" or the other backend, whose results alone are wrong.
    """
    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, **arguments: Any) -> None:
        right(tensor, **arguments)
        ours = arguments["group"] is dist.group.WORLD
        if dist.get_rank() == dist.get_world_size() - 1 and ours == (group == "dreamcomm"):
            tensor[3] += 1

    dist.all_reduce = wrong
    return run_rank(cases, settings)


def why_not_carried_here() -> str | None:
    """From what explain() says in this group."""
    return why_not_carried(dreamcomm.explain("all_reduce", 16))


def carried_by_nccl(cases: list[Case], settings: Settings) -> list[CaseResult]:
    """Runs the cases where dreamcomm hands the run's tensors to another group."""
    Team.not_carried = lambda self: self.first_problem("rank 1: no peer access")
    return run_rank(cases, settings)
