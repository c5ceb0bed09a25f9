"""The threads of the groups that calls are handed to."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from dreamcomm._torch.gloo_nccl import make_inner
from dreamcomm.backend import Options


def loops() -> set[int]:
    """The threads of this process in which Gloo waits for its connections."""
    found = set()
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            if name.read_text().startswith("gloo_tcp"):
                found.add(int(name.parent.name))
    return found


def begun_since(before: set[int]) -> set[int]:
    """Such threads; they name themselves some time after they were begun."""
    end = time.monotonic() + 60
    while not loops() - before and time.monotonic() < end:
        time.sleep(0.01)
    return loops() - before


@pytest.mark.parametrize("device_type", ["cpu", "hosts"])
def test_threads_of_gloo_take_no_processor_from_who_wakes_them(device_type: str) -> None:
    before = loops()
    policy = os.sched_getscheduler(0)
    inner = make_inner(HashStore(), 0, 1, Options(), device_type)
    assert inner.size() == 1
    begun = begun_since(before)
    assert {os.sched_getscheduler(thread) for thread in begun} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == policy


def test_a_policy_that_the_caller_has_chosen_stays() -> None:
    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        before = loops()
        inner = make_inner(HashStore(), 0, 1, Options(), "cpu")
        assert inner.size() == 1
        assert {os.sched_getscheduler(thread) for thread in begun_since(before)} == {os.SCHED_IDLE}
        assert os.sched_getscheduler(0) == os.SCHED_IDLE

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


@pytest.mark.parametrize("device_type", ["cpu", "hosts"])
def test_where_no_other_policy_may_be_chosen_gloo_serves(
    monkeypatch: pytest.MonkeyPatch, device_type: str
) -> None:
    def refuse(thread: int, policy: int, parameters: os.sched_param) -> None:
        raise PermissionError("as some sandboxes do")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert make_inner(HashStore(), 0, 1, Options(), device_type).size() == 1
