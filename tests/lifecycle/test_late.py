"""A rank that is late: its peers' errors tell what it does instead."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Fresh, Pool
from helpers.processes import replies
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("gloo names no rank")

SECONDS = 1.0  # the timeout of the group under test


def sleep(told: Path) -> None:
    time.sleep(2 * SECONDS)  # without waking: awake it would be seen to compute
    while not told.exists():
        time.sleep(0.05)


def compute(told: Path) -> None:
    data = torch.ones(100, 100)
    while not told.exists():
        data = (data @ data).clamp(0, 1)


def stop(told: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 lets it go on


def call_another_group(told: Path) -> None:
    del told
    dist.barrier(dist.distributed_c10d._get_default_group())


INSTEAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "sleeps": (sleep, " sleeps or waits, outside of all collectives"),
    "computes": (compute, " computes, outside of all collectives"),
    "is stopped": (stop, " is stopped (SIGSTOP or a debugger)"),
    "is in another group": (call_another_group, ", in group 'default', is in barrier as call"),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "recv": lambda group: dist.recv(torch.ones(3), 1, group=group),
    "monitored_barrier": lambda group: monitored_barrier(group),
}


def monitored_barrier(group: Any) -> None:
    import dreamcomm

    dreamcomm.monitored_barrier(group, timedelta(seconds=SECONDS))


def be_late(call: str, instead: str, told: str) -> tuple[int, str]:
    """Rank 0 makes the call in a group of its own, rank 1 does something else until told."""
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        INSTEAD[instead][0](Path(told))
        return os.getpid(), ""
    text = error_of(lambda: CALLS[call](group))
    Path(told).touch()
    os.kill(pids[1], signal.SIGCONT)
    if instead == "is in another group":
        dist.barrier()
    return os.getpid(), text


@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("call", CALLS)
def test_what_the_late_rank_does_instead(
    pool: Pool, tmp_path: Path, call: str, instead: str
) -> None:
    (_, text), (late, _) = pool.run(be_late, call, instead, str(tmp_path / "told"))
    assert "rank 1" in text.lower()
    assert f"its process {late}{INSTEAD[instead][1]}" in text


def stop_midway(seconds: float) -> tuple[str, float]:
    """Rank 0 stops somewhere in a large call, in which its peers wait for each other."""
    me = os.getpid()
    data = torch.ones(8_000_000)
    dist.barrier()
    if dist.get_rank() == 0 and os.fork() == 0:
        time.sleep(seconds)
        os.kill(me, signal.SIGSTOP)
        time.sleep(1.5 * SECONDS)
        os.kill(me, signal.SIGCONT)
        os._exit(0)
    while True:
        if dist.get_rank() == 2:  # so that its own deadline comes later
            time.sleep(0.02)
        begin = time.monotonic()
        text = error_of(lambda: dist.broadcast(data, 2))
        if text != "no error":
            return text, time.monotonic() - begin


def test_who_waits_for_the_late_rank_is_not_blamed(fresh: Fresh, soak: bool, slack: float) -> None:
    for round_ in range(12 if soak else 3):
        ranks = fresh.start(stop_midway, 0.2 + 0.007 * round_, world=4, group_timeout=SECONDS)
        for reply in replies(ranks, timeout=60)[1:]:
            assert reply.error is None, reply.error
            text, seconds = reply.value
            assert "rank 0" in text.split("in group", 1)[1], text
            assert seconds < 1.1 * SECONDS + 0.2 + slack
