"""Hosts that are far from the store: what they tell each other goes through it."""

from __future__ import annotations

import atexit
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Fresh
from helpers.processes import replies
from lifecycle.groups import Deadly, end_of

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")


class Far(Deadly):
    """A store that answers the library's own threads after a while."""

    def set(self, key: str, value: Any) -> None:
        travel()
        super().set(key, value)

    def get(self, key: str) -> bytes:
        travel()
        return super().get(key)

    def check(self, keys: list[str]) -> bool:
        travel()
        return super().check(keys)


class Cloned(Far):
    """One that can be cloned, as torch's can."""

    def clone(self) -> dist.Store:
        return self


def travel() -> None:
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.25)


def lose_a_rank_far_from_the_store(rank: int, port: int, number: int) -> tuple[str, float]:
    """Rank 2, by the signal of that number."""
    store = Far(dist.TCPStore("127.0.0.1", port, 3, False), "shm/maps/2", number)
    return end_of(
        lambda: dist.init_process_group("dreamcomm", store=store, rank=rank, world_size=3)
    )


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_what_hosts_tell_each_other_is_heard_far_from_the_store(
    fresh: Fresh, number: int, slack: float
) -> None:
    """And nobody is left in a store written in Python when the interpreter ends."""
    store = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
    env = {"DREAMCOMM_HOSTS": "a,b,b"}
    ranks = fresh.start(
        lose_a_rank_far_from_the_store, store.port, number, world=3, group=False, env=env
    )
    end = "has aborted the group: it was interrupted" if number == signal.SIGINT else "has ended"
    for reply in replies(ranks, 60)[:2]:
        assert reply.error is None, reply.error
        text, seconds = reply.value
        assert re.search(f"rank 2 {end}", text), text
        assert seconds < 5 + slack, text
    ends = [rank.finish() for rank in ranks]
    assert ends == [0, 0, 0 if number == signal.SIGINT else -signal.SIGKILL]


def end_far_from_the_store(rank: int, port: int) -> tuple[str, float]:
    """Rank 2, while the others are in a call."""
    store = Far(dist.TCPStore("127.0.0.1", port, 3, False), "no such key", 0)
    dist.init_process_group("dreamcomm", store=store, rank=rank, world_size=3)
    dist.barrier()
    if rank == 2:
        os._exit(1)
    found = end_of(lambda: dist.all_reduce(torch.ones(4)))
    near = dist.TCPStore("127.0.0.1", port, 3, False)
    near.set(f"told/{rank}", "")
    near.wait(["told/0", "told/1"])  # it lives on, with its store
    return found


def test_a_rank_that_gives_up_and_lives_on_is_told_of_far_from_the_store(
    fresh: Fresh, slack: float
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
    env = {"DREAMCOMM_HOSTS": "a,b,b"}
    ranks = fresh.start(end_far_from_the_store, store.port, world=3, group=False, env=env)
    for reply in replies(ranks[:2], 60):
        assert reply.error is None, reply.error
        text, seconds = reply.value
        assert "the process of rank 2 has ended" in text, text
        assert seconds < 5 + slack, text


def make_a_group_to_end_with(rank: int, port: int, kind: type[Far]) -> None:
    store = kind(dist.TCPStore("127.0.0.1", port, 2, False), "no such key", 0)
    atexit.register(id, store)  # kept as long
    dist.init_process_group("dreamcomm", store=store, rank=rank, world_size=2)


@pytest.mark.parametrize("kind", [Far, Cloned])
def test_nobody_is_left_in_a_store_written_in_python_when_the_interpreter_ends(
    fresh: Fresh, kind: type[Far]
) -> None:
    """What was told last while the group was made is still under way then."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    env = {"DREAMCOMM_HOSTS": "a,b"}
    ranks = fresh.start(make_a_group_to_end_with, store.port, kind, group=False, env=env)
    assert [reply.error for reply in replies(ranks, 60)] == [None, None]
    assert [rank.finish() for rank in ranks] == [0, 0]
