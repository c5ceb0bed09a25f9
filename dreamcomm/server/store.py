"""The store in which servers and workers find each other, and their numbers in a job."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from dreamcomm.server.errors import ServerUnreachable

__all__ = ["expected_workers", "next_rank", "open_store", "own"]

LOOK_SECONDS = 0.05
LISTEN_SECONDS = 2.0  # in which a port that is open is known to be
LIVE_SECONDS = 0.2  # in which the connection to a process that is being killed ends
# In which a store that is there answers. TCPStore looks up the names of both ends of a connection,
# which takes seconds where a nameserver does not answer.
STORE_SECONDS = 30.0


def open_store(given: Store | str | None, *, holds: bool, timeout: float) -> Store:
    """The store that servers and workers share.

    Args:
        given: a store; the address "host:port" of one; or None for the default group's, and without
            such a group the one of MASTER_ADDR and MASTER_PORT.
        holds: hold it in this process, if it is an address and no other process does.
        timeout: seconds until it has to be there.

    Raises:
        ServerUnreachable: nobody holds it.
        ValueError: there is no address.
    """
    if given is None and dist.is_initialized():
        return own(dist.distributed_c10d._get_default_store())
    if given is not None and not isinstance(given, str):
        return own(given)
    host, port = _address(given)
    by_agent = given is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _opened(host, port, holds and not by_agent, timeout)


def own(store: Store) -> Store:
    """A connection of our own, because a wait blocks all other users of one."""
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    return store if clone is None else clone()


def _address(given: str | None) -> tuple[str, int]:
    text = given
    if text is None:
        host, number = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if not host or not number:
            raise ValueError(
                'servers and workers meet in a store: give store="host:port" or a torch store, '
                "or set MASTER_ADDR and MASTER_PORT, or start with torchrun"
            )
        text = f"{host}:{number}"
    host, _, number = text.rpartition(":")
    if not host or not number.isdecimal():
        raise ValueError(f'expected the store\'s address as "host:port", got {text!r}')
    return host, int(number)


def _opened(host: str, port: int, holds: bool, timeout: float) -> Store:
    """The store at an address, held here or as soon as another process holds it."""
    until = time.monotonic() + timeout
    wait = timedelta(seconds=max(timeout, STORE_SECONDS))
    while True:
        if holds:
            # The next server of this process shares it.
            with suppress(dist.DistNetworkError):  # another process holds it
                return TCPStore(host, port, None, True, wait, False, True)
        try:
            _check_lives(host, port)
            return TCPStore(host, port, None, False, wait, False)
        except (OSError, RuntimeError) as error:
            if time.monotonic() >= until:
                raise ServerUnreachable(
                    f"no process holds the store at {host}:{port}: no answer within {timeout:g} s "
                    f"({error}). Server 0 or torchrun holds it; is it running, and is the address "
                    "right?"
                ) from error
        time.sleep(LOOK_SECONDS)


def _check_lives(host: str, port: int) -> None:
    """Raises OSError if no process listens there, or it is being killed.

    TCPStore, where none listens, writes a trace of its stack on the error output. And it goes on
    trying for its whole time where a process has ended since.
    """
    with socket.create_connection((host, port), LISTEN_SECONDS) as one:
        one.settimeout(LIVE_SECONDS)
        with suppress(TimeoutError):  # a store waits for the other side to begin
            one.recv(1)
            raise ConnectionAbortedError("the process that held it has ended")


def expected_workers(servers: int) -> int | None:
    """The workers of a job that torchrun or init_process_group has made, or None."""
    if dist.is_initialized():
        return max(dist.get_world_size() - servers, 1)
    size = os.environ.get("WORLD_SIZE", "")
    return max(int(size) - servers, 1) if size.isdecimal() else None


def next_rank(store: Store, name: str) -> int:
    """This worker's rank: its rank in the job, or the number of workers before it."""
    if dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else store.add(f"dreamcomm/{name}/workers", 1) - 1
