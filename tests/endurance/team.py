"""The processes of a soak, seen from the supervisor."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from endurance import rank
from endurance.judge import Heard
from endurance.orders import Struck, Told

ENDS = 30.0  # seconds a process gets to end, or to print its stacks


@dataclass
class Member:
    """One process."""

    process: ForkServerProcess
    connection: Connection
    log: Path
    said: list[Any] = field(default_factory=list)  # in this episode
    gone: bool = False  # its end of the connection is closed
    has_lost: bool = False  # its last group ended by a fault
    private: list[int] = field(default_factory=list)  # bytes allocated after each episode

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    def signal(self, number: signal.Signals) -> None:
        if not self.gone:  # its number may be another's by then
            os.kill(self.pid, number)

    def order(self, order: Any) -> None:
        self.said.clear()
        self.connection.send(order)

    def hear(self) -> None:
        """Takes in what has come; the process may have ended."""
        try:
            self.said.append(self.connection.recv())
        except (EOFError, ConnectionResetError):
            self.gone = True

    def last(self, kind: type) -> Any:
        """The last thing of this kind that it said, or None."""
        return next((one for one in reversed(self.said) if isinstance(one, kind)), None)

    def give_account(self, number: int, heard: Heard) -> None:
        """What it did as the rank of this number in an episode that is over."""
        told, own = self.last(Told), self.last(Struck)
        if own is not None:
            heard.struck = own.at
        if told is not None:
            heard.told[number] = told
            self.private.append(told.private_bytes)
        if self.gone:
            self.process.join()
            heard.exits[number] = self.process.exitcode
            heard.outputs[number] = self.output()

    def stacks(self) -> str:
        """Ends the process; what its threads were doing."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGABRT)
        self.process.join(ENDS)
        self.process.kill()
        self.gone = True
        return self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-8000:]

    def finish(self) -> int | None:
        """Lets the process end; its exit status, or None if it did not end by itself."""
        self.connection.close()
        self.process.join(ENDS)
        code = self.process.exitcode
        if code is None:
            self.stacks()
        return code


class Starter:
    """Starts processes, forked from one that has torch already: importing it takes seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = 0
        self.context: ForkServerContext = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["__main__", "torch", "torch._dynamo", "dreamcomm", "endurance.rank"]
        )

    def start(self) -> Member:
        ours, theirs = self.context.Pipe()
        log = self.folder / f"rank-{self.started}.log"
        log.touch()  # the process may end before it opens it
        self.started += 1
        process = self.context.Process(target=rank.serve, args=(theirs, str(log)), daemon=True)
        with theirs:
            process.start()
        return Member(process, ours, log)


def hear_all(team: Sequence[Member], until: float, kinds: tuple[type, ...]) -> bool:
    """Listens until each member has said one of these or has gone; False when it is late."""
    while True:
        silent = [m for m in team if not m.gone and not any(m.last(kind) for kind in kinds)]
        if not silent:
            return True
        left = until - time.monotonic()
        ready = wait([member.connection for member in silent], max(left, 0.0))
        if not ready:
            return False
        for member in silent:
            if member.connection in ready:
                member.hear()
