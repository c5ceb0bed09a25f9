"""What ends a wait: timeouts, absent ranks, abort. Each names who was waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

import dreamcomm
from helpers.pool import Pool

SHORT = timedelta(milliseconds=300)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:  # DistBackendError is one
        return str(error)
    return "no error"


def meet() -> None:
    """All ranks get here, without the group under test."""
    dist.barrier()


def group_timeout() -> list[str]:
    group = dist.new_group(timeout=SHORT)
    found = []
    if dist.get_rank() == 0:
        found = [error_of(lambda: dist.all_reduce(torch.ones(2), group=group)) for _ in range(2)]
    meet()
    if dist.get_rank() == 1:
        found = [error_of(lambda: dist.all_reduce(torch.ones(2), group=group)) for _ in range(2)]
    meet()
    return found


@pytest.mark.beyond_gloo("gloo names no rank")
def test_the_timeout_of_a_group_names_the_absent_rank(pool: Pool) -> None:
    (first, again), (late, _) = pool.run(group_timeout)
    assert "timeout" in first
    assert "rank 1" in first
    assert "all_reduce" in first
    assert "unusable" in again
    assert "rank 0 has aborted the group" in late


def late_after_a_change(kind: str, options: dict[str, Any]) -> str:
    """Rank 1 is late for a call of a group whose timeout was changed when it was in use."""
    group = dist.new_group(**options)
    dist.all_reduce(torch.ones(2), group=group)
    _set_pg_timeout(SHORT, group)
    text = ""
    if dist.get_rank() == 0:
        text = error_of(lambda: CHANGED[kind](group))
    meet()
    return text


CHANGED: dict[str, Callable[[dist.ProcessGroup], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(2), group=group),
    "async": lambda group: group.allreduce([torch.ones(2)]).wait(),
    "recv": lambda group: dist.recv(torch.ones(2), 1, group),
}


BEYOND_GLOO = pytest.mark.beyond_gloo("gloo ends no receive by it")


@pytest.mark.parametrize("kind", ["all_reduce", "async", pytest.param("recv", marks=BEYOND_GLOO)])
@pytest.mark.parametrize("hosts", ["", "a,b"])
def test_a_timeout_that_is_changed_holds_for_later_calls(
    pool: Pool, backend: str, kind: str, hosts: str
) -> None:
    options = {"pg_options": dreamcomm.Options(hosts=hosts)} if backend == "dreamcomm" else {}
    text = pool.run(late_after_a_change, kind, options)[0].lower()
    assert "time" in text, text


def set_no_timeout() -> str:
    try:
        _set_pg_timeout(timedelta(0))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.beyond_gloo("gloo takes it")
def test_a_timeout_of_no_time_is_refused(pool: Pool) -> None:
    assert all("positive timeout" in text for text in pool.run(set_no_timeout))


def one_call() -> str:
    options = dist.AllreduceOptions()
    options.timeout = SHORT
    group = dist.new_group()
    text = ""
    if dist.get_rank() == 0:
        text = error_of(lambda: group.allreduce([torch.ones(2)], options).wait())
    meet()
    return text


def test_the_timeout_of_one_call(pool: Pool) -> None:
    text = pool.run(one_call)[0].lower()
    assert "timeout" in text


def one_wait() -> str:
    group = dist.new_group()
    text = ""
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        text = error_of(lambda: work.wait(SHORT))
    meet()
    return text


@pytest.mark.beyond_gloo("gloo names no rank")
def test_the_timeout_of_one_wait(pool: Pool) -> None:
    assert "timed out" in pool.run(one_wait)[0].lower()


def missing_message() -> str:
    group = dist.new_group(timeout=SHORT)
    text = ""
    if dist.get_rank() == 0:
        text = error_of(lambda: dist.recv(torch.ones(2), 1, group, tag=4))
    meet()
    return text


@pytest.mark.beyond_gloo("gloo names no tag")
def test_a_message_that_never_comes(pool: Pool) -> None:
    text = pool.run(missing_message)[0]
    for part in ("recv", "rank 1", "tag 4", "timeout"):
        assert part in text


def pass_monitored_barrier(wait_all: bool) -> tuple[str, float]:
    import dreamcomm

    rank = dist.get_rank()
    text = ""
    if rank in (0, 2):
        text = error_of(lambda: dreamcomm.monitored_barrier(None, SHORT, wait_all))
    total = torch.ones(1)
    dist.all_reduce(total)
    dreamcomm.monitored_barrier(None, timedelta(seconds=20), wait_all)
    return text, total.item()


@pytest.mark.beyond_gloo("dreamcomm's own")
@pytest.mark.parametrize("wait_all", [False, True])
def test_a_monitored_barrier_names_the_absent_ranks(pool: Pool, wait_all: bool) -> None:
    found = pool.run(pass_monitored_barrier, wait_all, world=4)
    texts = [text for text, _ in found]
    assert "failed to pass monitoredBarrier" in texts[0]
    assert ("Ranks 1, 3" if wait_all else "Rank 1") in texts[0]
    assert texts[2] == texts[0]  # its words to the last, whatever they say of each absent rank
    assert [total for _, total in found] == [4.0] * 4


def abort_waiting(kind: str) -> str:
    group = dist.new_group()
    text = ""
    if dist.get_rank() == 0:
        entered = threading.Event()

        def wait_for_peer() -> None:
            nonlocal text
            entered.set()
            if kind == "recv":
                text = error_of(lambda: dist.recv(torch.ones(2), 1, group))
            elif kind == "async":
                work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
                text = error_of(work.wait)
            else:
                text = error_of(lambda: dist.all_reduce(torch.ones(2), group=group))

        waiter = threading.Thread(target=wait_for_peer)
        waiter.start()
        entered.wait()
        group.abort()
        waiter.join()
    meet()
    return text


@pytest.mark.beyond_gloo("gloo cannot abort")
@pytest.mark.parametrize("kind", ["all_reduce", "async", "recv"])
def test_abort_from_another_thread_releases_the_waiter(pool: Pool, kind: str) -> None:
    text = pool.run(abort_waiting, kind)[0]
    assert "abort" in text.lower()


def abort_reaches_peers() -> str:
    group = dist.new_group()
    text = ""
    if dist.get_rank() == 0:
        group.abort()
    else:
        text = error_of(lambda: dist.all_reduce(torch.ones(2), group=group))
    meet()
    return text


@pytest.mark.beyond_gloo("gloo cannot abort")
def test_abort_releases_the_peers_too(pool: Pool) -> None:
    assert "rank 0" in pool.run(abort_reaches_peers)[1]


def leave_early() -> str:
    group = dist.new_group()
    text = ""
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)
    else:
        text = error_of(lambda: dist.all_reduce(torch.ones(2), group=group))
    meet()
    return text


@pytest.mark.beyond_gloo("gloo tells of a closed connection only")
def test_a_rank_that_left_is_named(pool: Pool) -> None:
    text = pool.run(leave_early)[1]
    assert "rank 0" in text
    assert "left the group" in text


def kind_of_failure() -> list[str]:
    """What the backend says of its health before and after a timeout in the background."""
    group = dist.new_group(timeout=SHORT)
    backend = group._get_backend(torch.device("cpu"))
    found = [str(backend.get_error())]
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        error_of(work.wait)
        found.append(str(backend.get_error()))
    meet()
    return found


@pytest.mark.beyond_gloo("gloo does not tell")
def test_the_kind_of_a_failure_in_the_background(pool: Pool) -> None:
    before, after = pool.run(kind_of_failure)[0]
    assert "SUCCESS" in before
    assert "TIMEOUT" in after


def two_threads_in_one_barrier() -> list[str]:
    import dreamcomm

    found = []

    def hold() -> None:
        found.append(error_of(lambda: dreamcomm.monitored_barrier(None, timedelta(seconds=20))))

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.beyond_gloo("dreamcomm's own")
def test_two_threads_hold_monitored_barriers(pool: Pool) -> None:
    assert pool.run(two_threads_in_one_barrier) == [["no error"] * 2] * 2


def race_with_shutdown(rounds: int) -> int:
    """One thread issues calls while another shuts the group down: every call ends."""
    ended = 0
    for number in range(rounds):
        group = dist.new_group()
        backend = group._get_backend(torch.device("cpu"))
        options = dist.AllreduceOptions()
        options.asyncOp = True
        works: list[Any] = []

        def issue(backend: Any = backend, works: list[Any] = works, options: Any = options) -> None:
            while error_of(lambda: works.append(backend.allreduce([torch.ones(1)], options))) == (
                "no error"
            ):
                pass

        dist.barrier()
        issuing = threading.Thread(target=issue)
        issuing.start()
        threading.Event().wait(0.001 * (number % 5))
        backend.abort()
        backend.shutdown()
        issuing.join()
        for work in works:
            error_of(work.wait)
            ended += work.is_completed()
        assert ended or not works
        dist.barrier()
        dist.destroy_process_group(group)
    return ended


@pytest.mark.beyond_gloo("dreamcomm's own")
def test_calls_that_race_with_shutdown_all_end(pool: Pool, soak: bool) -> None:
    pool.run(race_with_shutdown, 400 if soak else 40)
