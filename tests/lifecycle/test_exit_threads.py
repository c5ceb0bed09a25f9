"""A process ends in order while its threads are in calls."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dreamcomm import monitored_barrier
from helpers.pool import Fresh
from helpers.processes import RankProcess, replies, values
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("gloo waits for its peers")


def ended(ranks: list[RankProcess]) -> list[str]:
    """Lets the ranks' processes end by themselves; returns what they have written."""
    values(replies(ranks, 60))
    for rank in ranks:
        rank.connection.close()  # all end at the same time
    codes = [rank.finish() for rank in ranks]
    texts = [rank.output() for rank in ranks]
    assert codes == [0] * len(ranks), texts
    return texts


def join(backend: str, store: str, rank: int, world: int, seconds: float = 60.0) -> None:
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )


def start(call: Callable[[], Any], daemon: bool) -> threading.Thread:
    """A thread that makes the call and tells how it ended."""

    def run() -> None:
        print(error_of(call), flush=True)

    thread = threading.Thread(target=run, daemon=daemon)
    thread.start()
    return thread


def wait_async() -> None:
    work = dist.all_reduce(torch.ones(10), async_op=True)
    assert work is not None
    work.wait()


CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(5)[::2]),
    "asynchronous": wait_async,
    "monitored_barrier": monitored_barrier,
    "new_group": dist.new_group,
}


def keep_calling(rank: int, backend: str, store: str, call: str) -> None:
    """A daemon thread makes calls without end. The main thread gets the interpreter when the
    thread is in one, and so ends it while the thread waits to return from there."""
    join(backend, store, rank, 1)
    begun = threading.Event()

    def run() -> None:
        while True:
            with suppress(RuntimeError, ValueError):  # the group is closed at exit
                CALLS[call]()
            begun.set()

    threading.Thread(target=run, daemon=True).start()
    begun.wait()


@pytest.mark.parametrize("call", CALLS)
def test_a_thread_that_returns_from_a_call_too_late(
    fresh: Fresh, backend: str, tmp_path: Path, call: str
) -> None:
    store = str(tmp_path / "store")
    ended(fresh.start(keep_calling, backend, store, call, world=1, group=False))


def wait_in_vain(rank: int, backend: str, store: str) -> None:
    """A daemon thread of each rank is in a call that its peer never makes."""
    join(backend, store, rank, 2)
    other = dist.new_group()
    dist.barrier()
    if rank == 0:
        start(lambda: dist.all_reduce(torch.ones(5)[::2], group=other), daemon=True)
    else:
        start(lambda: dist.recv(torch.ones(3), 0), daemon=True)


@pytest.mark.parametrize("times", [2, pytest.param(200, marks=pytest.mark.long)])
def test_daemon_threads_that_wait_for_peers(
    fresh: Fresh, backend: str, tmp_path: Path, times: int
) -> None:
    for number in range(times):
        ended(fresh.start(wait_in_vain, backend, str(tmp_path / f"{number}"), group=False))
        fresh.close()
        fresh.ranks.clear()


def wait_for_each_other(rank: int, backend: str, store: str) -> None:
    join(backend, store, rank, 2, seconds=1.0)
    start(lambda: dist.recv(torch.ones(3), 1 - rank), daemon=False)


def test_threads_that_the_interpreter_joins_end_by_the_timeout(
    fresh: Fresh, backend: str, tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    texts = ended(fresh.start(wait_for_each_other, backend, store, group=False))
    assert any("timeout" in text for text in texts), texts
    assert all("DistBackendError" in text for text in texts), texts


def call_at_exit(rank: int, backend: str, store: str) -> None:
    """Handlers run in the reverse order of their registration: here around the group's own."""

    def call(when: str) -> None:
        print(when, error_of(lambda: dist.all_reduce(torch.ones(3))), flush=True)

    atexit.register(call, "after:")
    join(backend, store, rank, 2)
    atexit.register(call, "before:")


def test_calls_of_exit_handlers(fresh: Fresh, backend: str, tmp_path: Path) -> None:
    for text in ended(fresh.start(call_at_exit, backend, str(tmp_path / "store"), group=False)):
        assert "before: no error" in text
        assert "after: DistBackendError" in text
        assert "was shut down" in text


def join_at_exit(rank: int, backend: str, store: str) -> None:
    threads: list[threading.Thread] = []

    def join_all() -> None:
        for thread in threads:
            thread.join()

    atexit.register(join_all)
    join(backend, store, rank, 2)
    threads.append(start(lambda: dist.recv(torch.ones(3), 1 - rank), daemon=True))


def test_an_exit_handler_can_join_a_thread_whose_call_the_exit_ends(
    fresh: Fresh, backend: str, tmp_path: Path
) -> None:
    for text in ended(fresh.start(join_at_exit, backend, str(tmp_path / "store"), group=False)):
        assert "DistBackendError" in text


kept: list[Any] = []


def call_back_at_exit(rank: int, backend: str, store: str) -> None:
    join(backend, store, rank, 2)
    if rank == 1:
        return
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    kept.append(work.get_future().then(lambda done: print("called back", flush=True)))


def test_a_callback_runs_while_the_process_ends(fresh: Fresh, backend: str, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    texts = ended(fresh.start(call_back_at_exit, backend, store, group=False))
    assert "called back" in texts[0]
