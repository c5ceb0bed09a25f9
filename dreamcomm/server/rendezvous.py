"""How servers and workers find each other: keys in a store, and a group of two for each pair.

A torch group cannot grow, and a rank that dies fails it for all. So each server and each worker
have a group of their own, and others neither wait for it nor fail with it. Keys of server i under
the name that the servers share::

    <name>/<i>/life                  a word that the latest server of this index has drawn; empty:
                                     it has ended
    <name>/<i>/<life>/arrivals       how many workers have asked for it
    <name>/<i>/<life>/accepted/<n>   the server makes a group with the n-th of them
    <name>/<i>/<life>/pair/<n>/...   where the two meet

A server that is started anew begins another life, also in a new store, and workers ask the latest.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from dreamcomm.backend import create
from dreamcomm.server.errors import ServerError, ServerUnreachable
from dreamcomm.server.pair import SERVER, WORKER, Pair
from dreamcomm.server.store import own

__all__ = ["LOOK_SECONDS", "Arrival", "Gate", "Visitor"]

FOR_EVER = timedelta(days=365)
LOOK_SECONDS = 0.02
RETRY_SECONDS = 1.0
LIFE_SECONDS = 1.0  # how often a server looks whether another one has taken its place
LOG = logging.getLogger("dreamcomm.server")


class _Keys:
    def __init__(self, store: Store, name: str, index: int) -> None:
        self.store, self.name, self.index = store, name, index
        self._prefix = f"dreamcomm/{name}/{index}"

    def key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])

    def latest(self) -> str:
        """The life of the latest server; "" if there is none, or it has ended."""
        key = self.key("life")
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def pair(self, life: str, number: int, rank: int, timeout: float) -> Pair:
        """Makes the group of two. Both sides call it."""
        from torch._C._distributed_c10d import _DistributedBackendOptions

        key = self.key(life, "pair", number)
        options: Any = _DistributedBackendOptions()
        options.store = PrefixStore(key, own(self.store))
        options.group_rank, options.group_size = rank, 2
        options.timeout = timedelta(seconds=timeout)
        options.group_id, options.global_ranks_in_group = key, [SERVER, WORKER]
        backend = create(options)
        if rank == SERVER:
            # What a worker computes between two messages takes as long as it takes.
            backend._set_default_timeout(FOR_EVER)
        return Pair(backend, SERVER + WORKER - rank)


class Arrival:
    """A worker that has asked for a server.

    Args:
        keys: of the server, in the store where it was asked for.
        life: of the server.
        number: of the worker in this life.
    """

    def __init__(self, keys: _Keys, life: str, number: int) -> None:
        self._keys, self._life, self.number = keys, life, number

    def accept(self, timeout: float) -> Pair:
        """Makes the pair with the worker. Raises RuntimeError if it is gone."""
        self._keys.store.set(self._keys.key(self._life, "accepted", self.number), "1")
        return self._keys.pair(self._life, self.number, SERVER, timeout)

    def forget(self) -> None:
        """Deletes the keys of a pair that has ended."""
        store, life, number = self._keys.store, self._life, self.number
        pairs = PrefixStore(self._keys.key(life, "pair", number), store)
        with suppress(RuntimeError):  # the store is lost
            for key in pairs.list_keys():
                pairs.delete_key(key)
            store.delete_key(self._keys.key(life, "accepted", number))


class Gate:
    """A server's side: registers, and finds the workers that ask.

    Args:
        store: shared with the workers.
        reopen: opens it again when it is lost.
        name: of the servers together.
        index: of this one.
    """

    def __init__(self, store: Store, reopen: Callable[[], Store], name: str, index: int) -> None:
        self._name, self._index, self._reopen = name, index, reopen
        self._next_try, self._next_life = math.inf, 0.0
        self._register(store)

    def _register(self, store: Store) -> None:
        self._keys = _Keys(store, self._name, self._index)
        self._life, self._seen = uuid.uuid4().hex, 0
        store.set(self._keys.key("life"), self._life)

    def arrivals(self) -> list[Arrival]:
        """The workers that have asked since the last call.

        Without its store a server goes on with the workers it has, and looks for a new store every
        second.

        Raises:
            ServerError: another server has registered in its place.
        """
        now, latest = time.monotonic(), self._life
        try:
            if self._next_try < math.inf:
                if now < self._next_try:
                    return []
                self._register(self._reopen())
                latest, self._next_try = self._life, math.inf
            keys = self._keys
            count = keys.store.add(keys.key(self._life, "arrivals"), 0)
            if now >= self._next_life:
                self._next_life, latest = now + LIFE_SECONDS, keys.latest()
        except RuntimeError as error:
            if self._next_try == math.inf:
                LOG.warning(
                    "server %d of %r has lost its store, and no worker can join: %s",
                    self._index, self._name, error,
                )  # fmt: skip
            self._next_try = now + RETRY_SECONDS
            return []
        if latest != self._life:
            raise ServerError(
                f"another server {self._index} of {self._name!r} has registered, so this one ends; "
                "give servers of another model another name="
            )
        new = range(self._seen, count)
        self._seen = count
        return [Arrival(self._keys, self._life, number) for number in new]

    def close(self) -> None:
        """Workers that ask from now on find no server."""
        with suppress(RuntimeError):  # the store is lost
            if self._next_try == math.inf:
                self._keys.store.compare_set(self._keys.key("life"), self._life, "")


class Visitor:
    """A worker's side: finds a server.

    Args:
        store: shared with the servers.
        reopen: opens it again within so many seconds, when it is lost.
        name: of the servers together.
        index: of the server.
    """

    def __init__(
        self, store: Store, reopen: Callable[[float], Store], name: str, index: int
    ) -> None:
        self._keys, self._reopen = _Keys(store, name, index), reopen
        self._met = ""  # the life that this worker has met last

    def meet_in(self, store: Store) -> None:
        """From now on, in another store."""
        self._keys = _Keys(store, self._keys.name, self._keys.index)

    def forget(self) -> None:
        """The life that this worker has met last may be met again."""
        self._met = ""

    def connect(self, timeout: float) -> Pair:
        """Makes the pair with the server's latest life that this worker has not met yet.

        Raises:
            ServerUnreachable: there is none within so many seconds.
        """
        until = time.monotonic() + timeout
        asked, number = self._met, 0
        while True:
            try:
                keys = self._keys
                life = keys.latest()
                if life not in (asked, ""):
                    number = keys.store.add(keys.key(life, "arrivals"), 1) - 1
                    asked = life
                if asked != self._met and keys.store.check([keys.key(asked, "accepted", number)]):
                    pair = keys.pair(asked, number, WORKER, timeout)
                    self._met = asked
                    return pair
            except RuntimeError as error:
                if time.monotonic() >= until:
                    raise ServerUnreachable(f"{self._who()} is not reachable: {error}") from error
                self._open_again(until)
                asked = self._met
            if time.monotonic() >= until:
                raise ServerUnreachable(self._why(asked, timeout))
            time.sleep(LOOK_SECONDS)

    def _open_again(self, until: float) -> None:
        """Opens the store that is lost, unless it is one that cannot be opened again."""
        try:
            self.meet_in(self._reopen(max(until - time.monotonic(), 0.0)))
        except ServerUnreachable:
            raise
        except RuntimeError as error:
            raise ServerUnreachable(
                f"{self._who()} is not reachable, because the store is lost: {error}. Give "
                "reconnect(store=) another one"
            ) from error

    def _who(self) -> str:
        return f"server {self._keys.index} of {self._keys.name!r}"

    def _why(self, asked: str, timeout: float) -> str:
        who = self._who()
        if asked == self._met == "":
            return (
                f"{who} is not reachable: none has registered in the store within {timeout:g} s. "
                "Is it running with the same store, name and number of servers?"
            )
        if asked == self._met:
            return f"{who} has not been started anew within {timeout:g} s"
        return f"{who} has registered, but has not answered within {timeout:g} s: has it ended?"
