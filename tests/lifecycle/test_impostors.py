"""Strangers who know all that a rank says to be let in: of another user, or with other memory."""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import os
import re
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dreamcomm
from helpers.logs import Kept
from helpers.pool import Fresh
from helpers.processes import RankProcess, replies, values
from lifecycle.groups import Deadly
from lifecycle.test_strangers import GREETING, MAGIC, VERSION, address_of, connect, wait_for

pytestmark = pytest.mark.beyond_gloo("gloo has no such address")

NOBODY = 65534  # the user of this number has no rights anywhere
CARD = re.compile(rb"dreamcomm \d+ \S+ (\d) 2 \d+ \d+ 0 ([0-9a-f]{32}) ")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def meet(rank: int, path: str) -> tuple[list[str], str]:
    """Rank 1 stops when all know its rank info and it has not called yet. Returns the log."""
    kept = Kept()
    logging.getLogger("dreamcomm").addHandler(kept)
    store: dist.Store = dist.FileStore(path, 2)
    if rank == 1:
        store = Deadly(store, "card/1", signal.SIGSTOP)
    dist.init_process_group(
        "dreamcomm", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    data = torch.ones(1000)
    dist.all_reduce(data)
    assert data.eq(2).all()
    words = dreamcomm.transport()
    dist.destroy_process_group()
    return kept.texts, words


def nonces_in(store: Path) -> list[bytes] | None:
    """The nonces of both ranks' rank infos, in their order, once both are there."""
    found = {int(m[1]): bytes.fromhex(m[2].decode()) for m in CARD.finditer(store.read_bytes())}
    return [found[0], found[1]] if len(found) == 2 else None


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def window_of(pid: int) -> int:
    """The memory of a rank, as its own: opened anew."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(link).startswith("/memfd:dreamcomm-window"):
            return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    raise AssertionError("no window")


def call_as_rank_1(address: str, nonces: list[bytes], memory: list[int]) -> int:
    """Descriptors that rank 0 hands over to who greets it so; it hangs up in the end."""
    greeting = GREETING.pack(MAGIC, VERSION, 1, nonces[1], nonces[0])
    got = 0
    with connect(address) as client:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", memory))]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendmsg([greeting], rights if memory else [])
            client.settimeout(30)
            while True:
                data, descriptors, _, _ = socket.recv_fds(client, 1000, 10)
                for descriptor in descriptors:
                    os.close(descriptor)
                got += len(descriptors)
                if not data:
                    break
    return got


def as_nobody(call: Callable[[], int]) -> int:
    """What the call returns in a process of another user."""
    pid = os.fork()
    if pid == 0:
        code = 77
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = call()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Doorstep:
    """Two ranks that are about to meet: rank 0 listens, and rank 1 has not called it yet."""

    def __init__(self, fresh: Fresh, folder: Path) -> None:
        store = folder / "store"
        self.ranks: list[RankProcess] = fresh.start(meet, str(store), group=False)
        wait_for(store.exists, "a store")
        self.nonces: list[bytes] = wait_for(lambda: nonces_in(store), "cards")
        wait_for(lambda: is_stopped(self.ranks[1].pid), "a stop")
        self.address = address_of(self.ranks[0].pid)

    def call(self, memory: list[int]) -> int:
        return call_as_rank_1(self.address, self.nonces, memory)

    def go_on(self) -> str:
        """The ranks make their group, in shared memory. Returns rank 0's log."""
        os.kill(self.ranks[1].pid, signal.SIGCONT)
        found = values(replies(self.ranks, timeout=60))
        for _, transport in found:
            assert transport.startswith("shm: 2 ranks"), transport
        (text,) = found[0][0]
        return str(text)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_handed_nothing(fresh: Fresh, tmp_path: Path) -> None:
    """With the right handshake and the memory of rank 1 itself."""
    door = Doorstep(fresh, tmp_path)
    window = window_of(door.ranks[1].pid)
    assert as_nobody(lambda: door.call([window])) == 0
    os.close(window)
    words = f"of user {NOBODY}: it is another user's, and this rank user 0's"
    assert words in door.go_on()


def unsealed(size: int) -> int:
    descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


def sealed(size: int, more: int = 0) -> int:
    descriptor = unsealed(size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS | more)
    return descriptor


def read_only(size: int) -> int:
    descriptor = sealed(size)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(descriptor)
    return again


def pipe(_: int) -> int:
    ends = os.pipe()
    os.close(ends[0])
    return ends[1]


HOSTILE: dict[str, Callable[[int], int]] = {
    "unsealed": unsealed,
    "of another size": lambda size: sealed(size - 4096),
    "empty": lambda _: sealed(0),
    "of nobody": sealed,  # right except for its nonce
    "not to be written": lambda size: sealed(size, fcntl.F_SEAL_WRITE),
    "to be read alone": read_only,
    "a pipe": pipe,
    "a device": lambda _: os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC),
}


def test_hostile_memory_is_refused_and_the_rank_let_in(fresh: Fresh, tmp_path: Path) -> None:
    """All one after another; a message without a descriptor, or with several, is no handshake."""
    door = Doorstep(fresh, tmp_path)
    window = window_of(door.ranks[1].pid)
    size = os.fstat(window).st_size
    clients = []
    for name, make in HOSTILE.items():
        descriptor = make(size)
        client = connect(door.address)
        greeting = GREETING.pack(MAGIC, VERSION, 1, door.nonces[1], door.nonces[0])
        socket.send_fds(client, [greeting], [descriptor])
        os.close(descriptor)
        clients.append((name, client))
    assert door.call([]) == door.call([window, window]) == 0
    os.close(window)
    text = door.go_on()
    for name, client in clients:
        with client, contextlib.suppress(ConnectionResetError):
            data, descriptors, _, _ = socket.recv_fds(client, 1000, 10)
            assert (data, descriptors) == (b"", []), name
    assert "it sent no valid handshake" in text
    assert "it connected as rank 1 with other memory" in text
    assert text.endswith(f"and {len(HOSTILE) + 2 - 3} more")
