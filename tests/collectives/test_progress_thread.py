"""The progress thread of a group sleeps while its calls are synchronous."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("looks at dreamcomm's threads")

CALLS = 2000


def switches() -> dict[str, int]:
    """How often each thread of this process has gone to sleep, without the calling one."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        found[task.name] = next(int(one.split()[1]) for one in lines if one.startswith("volun"))
    del found[str(Path("/proc/thread-self").resolve().name)]
    return found


def most_wakes() -> int:
    tensor = torch.ones(256)
    before_all = set(switches())
    dist.all_reduce(tensor, async_op=True).wait()
    made = set(switches()) - before_all
    assert made, "an asynchronous call starts a thread"
    before = switches()
    for _ in range(CALLS):
        dist.all_reduce(tensor)
    after = switches()
    return max(after[one] - before[one] for one in made)


def test_synchronous_calls_do_not_wake_it(pool: Pool) -> None:
    assert max(pool.run(most_wakes)) < CALLS / 10
