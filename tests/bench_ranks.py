"""What the ranks run in test_bench_runs.py: fresh interpreters import it from beside the tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dreamcomm.bench.cases import Case
from dreamcomm.bench.rank import run_rank
from dreamcomm.bench.result import CaseResult, Settings


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
