"""Ctrl-C ends a wait, on the waiting rank at once, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dreamcomm.observe.top import is_stopped
from helpers.census import census
from helpers.pool import Fresh
from lifecycle.groups import Deadly, error_of, use_everything

pytestmark = pytest.mark.beyond_gloo("gloo waits on")


def wait_async() -> None:
    work = dist.all_reduce(torch.ones(10), async_op=True)
    assert work is not None
    work.wait()


def wait_behind() -> None:
    """A call that needs a temporary waits for its turn behind one that never ends."""
    dist.all_reduce(torch.ones(10), async_op=True)
    dist.all_reduce(torch.ones(4, 4).t())


CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(10)),
    "asynchronous": wait_async,
    "behind": wait_behind,
    "barrier": dist.barrier,
    "recv": lambda: dist.recv(torch.ones(10), 1),
}


def interrupt_inside(call: Callable[[], Any]) -> str:
    """Runs `call` and sends this process SIGINT from inside of it.

    The sender gets hold of the interpreter only when the call lets go of it to wait: the
    switch interval keeps every other moment out.
    """
    ready = threading.Event()

    def send() -> None:
        ready.wait()
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        ready.set()
        call()
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        sys.setswitchinterval(before)
        sender.join()
    return "finished"


def wait_in_vain(name: str) -> dict[str, Any]:
    use_everything()
    dist.barrier()
    ended = "peer"
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        ended = interrupt_inside(CALLS[name])
        store.set("interrupted", "")
    else:
        store.wait(["interrupted"])  # a peer that leaves would end the wait, too
    dist.destroy_process_group()
    return {"ended": ended, "mappings": census().shared_mappings, "children": census().children}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_ends_the_wait(fresh: Fresh, name: str) -> None:
    found = fresh.run(wait_in_vain, name, group_timeout=300)
    assert [x["ended"] for x in found] == ["interrupted", "peer"]
    for left in found:
        assert not left["mappings"]
        assert left["children"] == 0


def be_interrupted_while_a_group_is_made(rank: int, path: str) -> str:
    """Rank 2 never comes; rank 1 is interrupted once rank 0 can know of it."""
    if rank == 2:
        return "away"
    store: dist.Store = dist.FileStore(path, 3)
    if rank == 1:
        store = Deadly(store, "card/1", signal.SIGINT)
    try:
        return error_of(
            lambda: dist.init_process_group("dreamcomm", store=store, rank=rank, world_size=3)
        )
    except KeyboardInterrupt:
        return "interrupted"


def test_an_interrupt_while_a_group_is_made_is_told_to_the_others(
    fresh: Fresh, tmp_path: Path
) -> None:
    found = fresh.run(
        be_interrupted_while_a_group_is_made, str(tmp_path / "store"), world=3, group=False
    )
    assert found[1] == "interrupted"
    assert "rank 1 could not set the group up: it was interrupted" in found[0]


def receive_after_an_interrupt() -> tuple[str, str, list[float]]:
    store = dist.distributed_c10d._get_default_store()
    first, second = torch.zeros(1), torch.zeros(1)
    if dist.get_rank() == 1:
        store.wait(["interrupted"])
        dist.send(torch.ones(1), 0)
        return "peer", "", []
    work = dist.irecv(first, 1)  # recv() waits as this does
    assert work is not None
    ended = interrupt_inside(work.wait)
    told = error_of(work.wait)
    store.set("interrupted", "")
    dist.recv(second, 1)
    return ended, told, [first.item(), second.item()]


def test_an_interrupted_receive_takes_no_message(fresh: Fresh) -> None:
    ended, told, received = fresh.run(receive_after_an_interrupt)[0]
    assert ended == "interrupted"
    assert "recv from rank 1 with tag 0 on rank 0 of 2 in group 'default' was interrupted" in told
    assert told.endswith("before a message came, and takes none any more")
    assert received == [0.0, 1.0]


def receive_after_an_interrupted_batch() -> tuple[str, list[float]]:
    store = dist.distributed_c10d._get_default_store()
    abandoned, wanted = torch.zeros(2), torch.zeros(1)
    if dist.get_rank() == 1:
        store.wait(["interrupted"])
        dist.send(torch.ones(1), 0, tag=1)
        return "peer", []
    receives = [dist.P2POp(dist.irecv, abandoned[i : i + 1], 1, tag=i) for i in range(2)]
    (work,) = dist.batch_isend_irecv(receives)
    ended = interrupt_inside(work.wait)
    store.set("interrupted", "")
    dist.recv(wanted, 1, tag=1)
    return ended, [*abandoned.tolist(), wanted.item()]


def test_of_an_interrupted_batch_no_receive_takes_a_message(fresh: Fresh) -> None:
    found = fresh.run(receive_after_an_interrupted_batch)[0]
    assert found == ("interrupted", [0.0, 0.0, 1.0])


class Interrupted(logging.Handler):
    """Ctrl-C comes while a warning is written."""

    def emit(self, record: logging.LogRecord) -> None:
        raise KeyboardInterrupt


def be_interrupted_while_told() -> str:
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["interrupted"])
        return "peer"
    logging.getLogger("dreamcomm").addHandler(Interrupted())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as spawn's ranks do once they heard of one
    try:
        return error_of(lambda: dist.all_reduce(torch.ones(1)))
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        store.set("interrupted", "")


def test_an_interrupt_while_the_user_is_told_of_a_wait_ends_it(fresh: Fresh) -> None:
    assert fresh.run(be_interrupted_while_told, group_timeout=20)[0] == "interrupted"


def call_in_a_handler(call: str) -> tuple[str, float]:
    """Rank 0's handler makes a call during another one, which rank 1 enters later."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    begin = time.monotonic()
    if dist.get_rank() == 1:
        store.wait(["handled"])
        return error_of(lambda: dist.all_reduce(torch.ones(10))), time.monotonic() - begin

    def handle(*_: object) -> None:
        CALLS[call]()

    signal.signal(signal.SIGUSR1, handle)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    text = error_of(lambda: dist.all_reduce(torch.ones(10)))
    store.set("handled", "")  # not before: what rank 0 had put down would be enough for rank 1
    return text, time.monotonic() - begin


@pytest.mark.parametrize("call", ["all_reduce", "asynchronous"])
def test_a_handler_is_refused_a_call_that_would_wait_for_it(fresh: Fresh, call: str) -> None:
    (mine, seconds), (other, _) = fresh.run(call_in_a_handler, call, group_timeout=300)
    assert "all_reduce on rank 0 of 2 was called by a signal's handler while this rank" in mine
    assert seconds < 60
    assert "rank 0 has aborted the group" in other, other


def call_in_a_handler_of_a_wait() -> list[float]:
    """What a handler does in the midst of a wait for a message holds nothing up."""
    store = dist.distributed_c10d._get_default_store()
    found, data = torch.zeros(1), torch.ones(1)
    if dist.get_rank() == 1:
        store.wait(["handled"])
        dist.all_reduce(data)
        dist.send(data, 0)
        return data.tolist()

    def handle(*_: object) -> None:
        store.set("handled", "")
        dist.all_reduce(data)

    signal.signal(signal.SIGUSR1, handle)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    dist.recv(found, 1)
    return found.tolist()


def test_a_handler_may_make_calls_while_a_message_is_waited_for(fresh: Fresh) -> None:
    assert fresh.run(call_in_a_handler_of_a_wait) == [[2.0], [2.0]]


def interrupt_once_it_is_stopped(written: Path) -> None:
    """Sends this process SIGINT when the one whose number is written there has been stopped."""
    end = time.monotonic() + 60
    while not (written.exists() and written.read_text() and is_stopped(int(written.read_text()))):
        if time.monotonic() > end:
            return  # this process's own wait ends at its timeout, and the test fails
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def be_interrupted_while_a_rank_that_has_come_is_stopped(rank: int, path: str) -> str:
    """Rank 0 is stopped once its peer has connected to it, and does not answer."""
    store: dist.Store = dist.FileStore(path, 2)
    stopped = Path(f"{path}-pid")
    if rank == 0:
        stopped.write_text(str(os.getpid()))
        store = Deadly(store, "dial/0", signal.SIGSTOP)
    else:
        threading.Thread(target=interrupt_once_it_is_stopped, args=(stopped,)).start()
    brief = timedelta(seconds=90)
    try:
        return error_of(
            lambda: dist.init_process_group(
                "dreamcomm", store=store, rank=rank, world_size=2, timeout=brief
            )
        )
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        if rank == 1:
            os.kill(int(stopped.read_text()), signal.SIGCONT)


def test_an_interrupt_ends_a_wait_for_a_rank_that_has_stopped_while_they_met(
    fresh: Fresh, tmp_path: Path
) -> None:
    found = fresh.run(
        be_interrupted_while_a_rank_that_has_come_is_stopped, str(tmp_path / "store"), group=False
    )
    assert found[1] == "interrupted"
    assert "rank 1 could not set the group up: it was interrupted" in found[0]
