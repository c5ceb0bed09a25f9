"""A rank that stops in the middle of a large call between hosts: who is blamed."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.processes import replies
from internode.hosts import Hosts
from internode.test_collectives import TWO_OF_TWO
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")

SECONDS = 3.0


def reduce_until_it_fails(begun: str) -> tuple[str, float]:
    data = torch.ones(2_000_000)
    while True:
        begin = time.monotonic()
        text = error_of(lambda: dist.all_reduce(data))
        if text != "no error":
            return text, time.monotonic() - begin
        data.fill_(1.0)
        Path(begun).touch()


@pytest.mark.parametrize(
    ("victim", "store"),
    [
        (0, "file"),
        (0, "tcp"),
        (2, "tcp"),
        *(
            pytest.param(*rest, marks=pytest.mark.long)
            for rest in [(1, "file"), (1, "tcp"), (2, "file")]
        ),
    ],
)
def test_the_stopped_rank_is_named_by_all(
    hosts: Hosts, tmp_path: Path, victim: int, store: str, slack: float
) -> None:
    """Also where it is the one whose process keeps the store, which answers nobody then."""
    begun = tmp_path / "begun"
    ranks = hosts.start(TWO_OF_TWO, reduce_until_it_fails, str(begun), seconds=SECONDS, store=store)
    while not begun.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(ranks[victim].pid, signal.SIGSTOP)
    others = [rank for rank in range(4) if rank != victim]
    found = replies([ranks[rank] for rank in others], 30)
    silent = store == "tcp" and victim == 0  # the store, for which nobody waits longer than 0.3 s
    for rank, reply in zip(others, found, strict=True):
        assert reply.error is None, reply.error
        text, seconds = reply.value
        latest = SECONDS * 1.1 + (1.1 if silent else 0.5) + slack
        assert SECONDS - 0.1 <= seconds <= latest, (rank, text)
        # Those who wait for it know no more than that; its host knows that it is stopped. Without a
        # store the other host may know whom it waits for, and not for whom that one does.
        named = [rf"rank {victim}\b", *(["waits for rank 1 of host"] if silent else [])]
        assert any(re.search(words, text) for words in named), (rank, text)
    told = found[others.index(victim ^ 1)].value[0]
    assert "is stopped (SIGSTOP or a debugger)" in told, told
