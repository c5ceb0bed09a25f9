"""How servers and workers find each other: keys in a store, and a group of two for each pair.

A torch group cannot grow, and a rank that dies fails it for all. So each server and each worker
have a group of their own, and others neither wait for it nor fail with it. Keys of server i under
the name that the servers share::

    <name>/<i>/life                  a word that the latest server of this index has drawn
    <name>/<i>/<life>/arrivals       how many workers have asked for it
    <name>/<i>/<life>/accepted/<n>   the server makes a group with the n-th of them
    <name>/<i>/<life>/pair/<n>/...   where the two meet

A server that is started anew begins another life, also in a new store, and workers ask the latest.
"""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from dreamcomm.backend import create
from dreamcomm.server.errors import ServerUnreachable
from dreamcomm.server.pair import SERVER, WORKER, Pair

__all__ = ["Gate", "Visitor", "expected_workers", "next_rank", "open_store"]

LOOK_SECONDS = 0.02
STORE_SECONDS = 2.0  # in which a store that is there answers
RETRY_SECONDS = 1.0
LOG = logging.getLogger("dreamcomm.server")


def open_store(given: Store | str | None, *, holds: bool, timeout: float) -> Store:
    """The store that servers and workers share.

    Args:
        given: a store; the address "host:port" of one; or None for the default group's, and without
            such a group the one of MASTER_ADDR and MASTER_PORT.
        holds: hold it in this process, if it is an address and torchrun does not.
        timeout: seconds until it has to be there.

    Raises:
        ServerUnreachable: nobody holds it.
        ValueError: there is no address.
    """
    if given is None and dist.is_initialized():
        return _own(dist.distributed_c10d._get_default_store())
    if given is not None and not isinstance(given, str):
        return _own(given)
    host, port = _address(given)
    by_agent = given is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if holds and not by_agent:
        return TCPStore(host, port, None, True, timedelta(seconds=timeout), False)
    return _client(host, port, timeout)


def _own(store: Store) -> Store:
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


def _client(host: str, port: int, timeout: float) -> Store:
    """A connection to the store, as soon as somebody holds it."""
    until = time.monotonic() + timeout
    while True:
        try:
            wait = timedelta(seconds=min(timeout, STORE_SECONDS))
            return TCPStore(host, port, None, False, wait, False)
        except (RuntimeError, dist.DistNetworkError) as error:
            if time.monotonic() >= until:
                raise ServerUnreachable(
                    f"nobody holds the store at {host}:{port}: no answer within {timeout:g} s. "
                    "Server 0 or torchrun holds it; is it running, and is the address right?"
                ) from error


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


class _Keys:
    def __init__(self, store: Store, name: str, index: int) -> None:
        self.store, self.name, self.index = store, name, index
        self._prefix = f"dreamcomm/{name}/{index}"

    def key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])

    def pair(self, life: str, number: int, rank: int, timeout: float) -> Pair:
        """Makes the group of two. Both sides call it."""
        from torch._C._distributed_c10d import _DistributedBackendOptions

        key = self.key(life, "pair", number)
        options: Any = _DistributedBackendOptions()
        options.store = PrefixStore(key, _own(self.store))
        options.group_rank, options.group_size = rank, 2
        options.timeout = timedelta(seconds=timeout)
        options.group_id, options.global_ranks_in_group = key, [SERVER, WORKER]
        return Pair(create(options), SERVER + WORKER - rank)


class Gate:
    """A server's side: registers, and accepts workers.

    Args:
        store: shared with the workers.
        reopen: opens it again when it is lost.
        name: of the servers together.
        index: of this one.
    """

    def __init__(self, store: Store, reopen: Callable[[], Store], name: str, index: int) -> None:
        self._name, self._index, self._reopen = name, index, reopen
        self._next_try = math.inf
        self._register(store)

    def _register(self, store: Store) -> None:
        self._keys = _Keys(store, self._name, self._index)
        self._life, self._seen = uuid.uuid4().hex, 0
        store.set(self._keys.key("life"), self._life)

    def arrivals(self) -> list[int]:
        """The numbers of the workers that have asked since the last call.

        Without its store a server goes on with the workers it has, and looks for a new store every
        second.
        """
        now = time.monotonic()
        try:
            if self._next_try < math.inf:
                if now < self._next_try:
                    return []
                self._register(self._reopen())
                self._next_try = math.inf
            keys = self._keys
            count = keys.store.add(keys.key(self._life, "arrivals"), 0)
        except RuntimeError as error:
            if self._next_try == math.inf:
                LOG.warning(
                    "server %d of %r has lost its store, and no worker can join: %s",
                    self._index, self._name, error,
                )  # fmt: skip
            self._next_try = now + RETRY_SECONDS
            return []
        new = list(range(self._seen, count))
        self._seen = count
        return new

    def accept(self, number: int, timeout: float) -> Pair:
        """Makes the pair with a worker that has asked. Raises RuntimeError if it is gone."""
        keys, life = self._keys, self._life
        keys.store.set(keys.key(life, "accepted", number), "1")
        return keys.pair(life, number, SERVER, timeout)


class Visitor:
    """A worker's side: finds a server.

    Args:
        store: shared with the servers.
        name: of the servers together.
        index: of the server.
    """

    def __init__(self, store: Store, name: str, index: int) -> None:
        self._keys = _Keys(store, name, index)
        self._met = ""  # the life that this worker has met last

    def meet_in(self, store: Store) -> None:
        """From now on, in another store."""
        self._keys = _Keys(store, self._keys.name, self._keys.index)

    def connect(self, timeout: float) -> Pair:
        """Makes the pair with the server's latest life that this worker has not met yet.

        Raises:
            ServerUnreachable: there is none within so many seconds.
        """
        until = time.monotonic() + timeout
        asked, number = self._met, 0
        keys = self._keys
        while True:
            life = self._latest()
            if life != asked:
                number = keys.store.add(keys.key(life, "arrivals"), 1) - 1
                asked = life
            if asked != self._met and keys.store.check([keys.key(asked, "accepted", number)]):
                self._met = asked
                return keys.pair(asked, number, WORKER, timeout)
            if time.monotonic() >= until:
                raise ServerUnreachable(self._why(asked, timeout))
            time.sleep(LOOK_SECONDS)

    def _latest(self) -> str:
        key = self._keys.key("life")
        return self._keys.store.get(key).decode() if self._keys.store.check([key]) else self._met

    def _why(self, asked: str, timeout: float) -> str:
        who = f"server {self._keys.index} of {self._keys.name!r}"
        if asked == self._met == "":
            return (
                f"{who} is not reachable: none has registered in the store within {timeout:g} s. "
                "Is it running with the same store, name and number of servers?"
            )
        if asked == self._met:
            return f"{who} has not been started anew within {timeout:g} s"
        return f"{who} has registered, but has not answered within {timeout:g} s: has it ended?"
