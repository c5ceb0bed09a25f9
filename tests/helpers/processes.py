"""Rank processes: started, asked, waited for, and ended without a trace."""

from __future__ import annotations

import pickle
import signal
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from helpers.calls import Call, Group, Reply, locate
from helpers.nursery import Nursery


class RanksFailed(Exception):
    """Some ranks raised, died or hung; `by_rank` holds what each one said."""

    def __init__(self, by_rank: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {r} ---\n{x}" for r, x in by_rank.items()))
        self.by_rank = by_rank


class RankProcess:
    """One process that runs functions as a rank."""

    def __init__(self, nursery: Nursery, log: Path) -> None:
        ours, theirs = socket.socketpair()
        self.log = log
        with theirs:
            self.process = nursery.fork(log, theirs)
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, call: Call) -> None:
        self.connection.send_bytes(pickle.dumps(call))

    def reply(self) -> Reply:
        """The reply that is there, or why none will come."""
        try:
            reply = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self.process.wait()
            return Reply(error=f"process ended with {code}; its output:\n{self.output()}")
        assert isinstance(reply, Reply)
        return reply

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-8000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def finish(self) -> int:
        """Lets the process end by itself; returns its exit status."""
        self.connection.close()
        return self.process.wait()

    def dump(self) -> str:
        """Ends the process; returns the stacks of all its threads."""
        self.process.send_signal(signal.SIGABRT)
        self.process.wait()
        return self.output()


def ask_all(
    ranks: Sequence[RankProcess],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: Group | None,
    env: dict[str, str] | None = None,
) -> None:
    """Starts the function in all of the ranks."""
    file, name = locate(function)
    for rank, process in enumerate(ranks):
        process.ask(Call(file, name, rank, args, kwargs, group, env or {}))


def replies(ranks: Sequence[RankProcess], timeout: float) -> list[Reply]:
    """All replies in rank order. A rank that gives none within `timeout` seconds is ended,
    and its reply holds the stacks of its threads."""
    deadline = time.monotonic() + timeout
    found: dict[int, Reply] = {}
    while len(found) < len(ranks):
        missing = {p.connection: r for r, p in enumerate(ranks) if r not in found}
        ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in missing.values():
                stacks = ranks[rank].dump()
                found[rank] = Reply(error=f"no reply within {timeout:g} s; stacks:\n{stacks}")
        for connection in ready:
            rank = missing[connection]  # type: ignore[index]
            found[rank] = ranks[rank].reply()
    return [found[rank] for rank in range(len(ranks))]


def values(found: Sequence[Reply]) -> list[Any]:
    """The values of the replies; raises RanksFailed if there are errors among them."""
    errors = {rank: reply.error for rank, reply in enumerate(found) if reply.error}
    if errors:
        raise RanksFailed(errors)
    return [reply.value for reply in found]


def value_of(found: Sequence[Reply], rank: int) -> Any:
    """The value of one rank's reply, whatever became of the others; raises RanksFailed if it
    failed."""
    if found[rank].error:
        raise RanksFailed({rank: reply.error for rank, reply in enumerate(found) if reply.error})
    return found[rank].value
