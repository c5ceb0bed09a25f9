"""Strangers at a rank's address: whatever they send, they are refused and harm nothing."""

from __future__ import annotations

import array
import contextlib
import logging
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dreamcomm import _C
from helpers.census import Census, census
from helpers.logs import Kept
from helpers.pool import Fresh
from helpers.processes import RankProcess, replies, values
from lifecycle.groups import use_everything

pytestmark = pytest.mark.beyond_gloo("gloo has no such address")

GREETING = struct.Struct("=12sII16s16s")  # csrc/transport/bootstrap/handshake.h
MAGIC = b"dreamcomm\0\0\0"
VERSION = _C.PROTOCOL_VERSION


def meet(rank: int, folder: str) -> tuple[list[str], list[Census]]:
    """Rank 1 comes when the test says so; what was logged, and what is left of two meetings."""
    kept = Kept()
    logging.getLogger("dreamcomm").addHandler(kept)
    left = []
    for turn in range(2):
        if rank == 1 and turn == 1:
            wait_for(Path(folder, "come").exists, "leave to come")
        store = dist.FileStore(f"{folder}/store-{turn}", 2)
        dist.init_process_group("dreamcomm", store=store, rank=rank, world_size=2)
        use_everything()
        dist.destroy_process_group()
        left.append(census())
        Path(folder, f"done-{rank}-{turn}").touch()
    return kept.texts, left


def wait_for(found: Callable[[], Any], what: str) -> Any:
    """What is found in the end; fails after a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.01)
    raise AssertionError(f"a minute without {what}")


def address_of(pid: int) -> str:
    """The abstract address that the process listens at."""

    def find() -> str | None:
        names = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines())
        return next((name[1:] for name in names if name.startswith(f"@dreamcomm-{pid}-")), None)

    return str(wait_for(find, "an address"))


def greetings(chance: random.Random, count: int) -> Iterator[bytes]:
    """Random bytes, and handshakes that are wrong in one or several fields or cut off."""
    for _ in range(count):
        if chance.random() < 0.3:
            yield chance.randbytes(chance.choice([1, 51, 52, 53, 4096, 60_000]))
            continue
        magic = MAGIC if chance.random() < 0.9 else chance.randbytes(12)
        version = VERSION if chance.random() < 0.7 else chance.getrandbits(32)
        sender = chance.choice([0, 1, 2, 2**31, 2**32 - 1])
        whole = GREETING.pack(magic, version, sender, chance.randbytes(16), chance.randbytes(16))
        yield whole[: chance.randrange(1, len(whole) + 1)] if chance.random() < 0.3 else whole


def say(client: socket.socket, data: bytes, descriptors: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # closed by then
        client.sendmsg([data], rights if descriptors else [])


def connect(address: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect("\0" + address)
    return client


def start(fresh: Fresh, folder: Path) -> list[RankProcess]:
    """Two ranks, of which one waits for the other in their second meeting."""
    ranks = fresh.start(meet, str(folder), group=False)
    for rank in range(2):
        wait_for((folder / f"done-{rank}-0").exists, f"rank {rank}'s first meeting")
    return ranks


def finish(ranks: list[RankProcess], folder: Path) -> str:
    """Lets rank 1 continue. Returns rank 0's log."""
    (folder / "come").touch()
    found = values(replies(ranks, timeout=60))
    for _, (first, last) in found:
        assert last == first
    (text,) = found[0][0]
    assert isinstance(text, str)
    return text


def test_thousands_of_wrong_greetings(fresh: Fresh, tmp_path: Path, soak: bool) -> None:
    count = 50_000 if soak else 3_000
    ranks = start(fresh, tmp_path)
    address = address_of(ranks[0].pid)
    chance = random.Random(1)
    descriptors = Path(f"/proc/{ranks[0].pid}/fd")
    before = len(list(descriptors.iterdir()))
    with open(os.devnull) as something:
        for data in greetings(chance, count):
            with connect(address) as client:
                say(client, data, [something.fileno()] * chance.choice([0, 1, 1, 2, 3, 200]))
    wait_for(lambda: len(list(descriptors.iterdir())) <= before, "all of them being closed")
    text = finish(ranks, tmp_path)
    assert text.startswith("rank 0 of 2 refused connections of strangers to its address: process")
    assert f"process {os.getpid()} of user {os.getuid()}: it " in text
    assert text.endswith(f"and {count - 3} more")


def test_a_greeting_of_another_version_is_refused_with_both_versions(
    fresh: Fresh, tmp_path: Path
) -> None:
    ranks = start(fresh, tmp_path)
    with connect(address_of(ranks[0].pid)) as client, open(os.devnull) as something:
        say(client, GREETING.pack(MAGIC, 77, 1, bytes(16), bytes(16)), [something.fileno()])
        assert client.recv(1) == b""  # closed
    assert f"protocol 77, this rank one with protocol {VERSION}" in finish(ranks, tmp_path)


def test_strangers_that_say_nothing_hold_up_nobody(fresh: Fresh, tmp_path: Path) -> None:
    """Also more of them than a rank listens to at a time."""
    ranks = start(fresh, tmp_path)
    address = address_of(ranks[0].pid)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(address)) for _ in range(200)]
        text = finish(ranks, tmp_path)
        assert len(clients) == 200
    assert "it said nothing" in text


def test_two_versions_in_one_job_refuse_each_other() -> None:
    """A rank whose rank info, where dreamcomm's ranks read it, has another protocol."""

    store = dist.HashStore()
    card = f"dreamcomm {VERSION + 1} beta 1 2 1 1 0 {'0' * 32} 0 {'0' * 32} socket none"
    dist.PrefixStore("shm", dist.PrefixStore("dreamcomm/visit/2/1", store)).set("card/1", card)
    words = f"runs a dreamcomm with protocol {VERSION + 1}, this rank one with protocol {VERSION}"
    with pytest.raises(dist.DistBackendError, match=f"rank 1 on host beta {words}"):
        _C.DreamBackend(store, 0, 2, _C.Options(heap_bytes=0), None)
