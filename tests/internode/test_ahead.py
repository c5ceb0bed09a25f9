"""What a host sends as a call opens is received a call ahead: what follows from that."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from internode.hosts import TWO_OF_TWO, Hosts
from lifecycle.groups import error_of


def interrupt_a_leader(folder: str) -> tuple[str, float]:
    """Rank 0 waits for a host that is late. Rank 0's data has arrived there, so this call succeeds
    on that host, and the next one fails."""
    dist.barrier()
    rank = dist.get_rank()
    if rank >= 2:
        while not Path(folder, "told").exists():
            time.sleep(0.02)
        assert error_of(dist.barrier) == "no error"
        return error_of(dist.barrier), 0
    if rank == 0:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
    begin = time.monotonic()
    try:
        text = error_of(dist.barrier)
    except KeyboardInterrupt:
        text = "interrupted"
    Path(folder, "told").touch()
    return text, time.monotonic() - begin


def test_an_interrupt_ends_the_wait_for_another_host(hosts: Hosts, tmp_path: Path) -> None:
    found = hosts.run(TWO_OF_TWO, interrupt_a_leader, str(tmp_path))
    assert found[0][0] == "interrupted"
    assert found[0][1] < 1.5
    for text, _ in found[1:]:
        assert "barrier() was interrupted on rank 0" in text, text


def profile_each_call() -> set[str]:
    names = set()
    for number in range(60):
        with torch.autograd.profiler.profile() as run:
            dist.all_reduce(torch.ones(10 if number % 2 else 500_000))
        names |= {event.name for event in run.function_events}
    return names


def test_a_profiler_sees_calls_and_not_their_messages(hosts: Hosts) -> None:
    """A message that is received ahead ends in another run of the profiler than it began in."""
    for names in hosts.run([[0], [1, 2]], profile_each_call):
        assert "dreamcomm:all_reduce" in names
        assert not any(name.startswith("gloo:") for name in names), names


def reduce_in(group: dist.ProcessGroup, seconds: float) -> None:
    """An all_reduce with a timeout of its own; the group's is long enough for a busy machine."""
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=seconds)
    group.allreduce([torch.ones(10)], options).wait()


def fail_groups() -> list[str]:
    """What is in use of the heap after the first of some groups that fail, and after the last."""
    from dreamcomm.info import explain

    in_use = []
    for number in range(6):
        group = dist.new_group([0, 1, 2])
        dist.all_reduce(torch.ones(10), group=group)
        if dist.get_rank() != 2:
            assert "timeout" in error_of(lambda group=group: reduce_in(group, 0.3))
        dist.barrier()
        dist.destroy_process_group(group)
        if number in (0, 5):
            in_use += re.findall(r"heap of this rank: .* in use", explain("all_reduce", 100))
    return in_use


def test_groups_that_fail_leave_no_memory_in_the_heap(hosts: Hosts) -> None:
    for first, last in hosts.run([[0], [1, 2]], fail_groups):
        assert first == last
