"""Hosts that cannot reach each other when a group is made."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers.pool import Fresh
from helpers.processes import replies
from lifecycle.groups import error_of
from spanning.network import Network, NoNetwork, enter

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")


def connect_in_vain(rank: int, network: list[str], path: str) -> tuple[str, float]:
    """A rank on each host, of which rank 0's user loses patience."""
    enter(network[rank])
    if rank == 0:
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        text = error_of(
            lambda: dist.init_process_group(
                "dreamcomm", store=dist.FileStore(path, 2), rank=rank, world_size=2
            )
        )
    except KeyboardInterrupt:
        text = "interrupted"
    return text, time.monotonic() - begin


def test_hosts_that_cannot_connect(fresh: Fresh, tmp_path: Path, slack: float) -> None:
    try:
        with Network(2) as network:
            network.cut(1)
            ranks = fresh.start(
                connect_in_vain, network.hosts, str(tmp_path / "store"), world=2, group=False
            )
            found = [reply.value for reply in replies(ranks, 60)]
    except NoNetwork as why:
        pytest.skip(str(why))
    (interrupted, seconds), (told, soon) = found
    assert interrupted == "interrupted"
    assert seconds < 4.0 + slack
    assert soon < 2.0 + slack
    for words in ("rank 1 of 2", "could not connect with the ranks of other hosts", "unreachable"):
        assert words in told, told
