"""The parent's handle on one rank: starts it, receives its message, ends it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dreamcomm.launch import rank_main
from dreamcomm.launch.ending import Ending

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Failure:
    """How a rank failed. ``when`` is on the clock of ``time.monotonic``, in seconds."""

    rank: int
    when: float
    traceback: str | None = None
    exitcode: int = 0

    @property
    def signal(self) -> int | None:
        """One of ``signal.Signals`` where Python has a name for it."""
        return known_signal(-self.exitcode) if self.exitcode < 0 else None

    def order(self) -> tuple[bool, float]:
        """Sorts causes before consequences: peers may notice a killed rank before the parent does.

        SIGABRT does not count as a cause: a C++ runtime raises it for an uncaught exception, which
        may be a consequence of another rank's failure.
        """
        killed = self.signal not in (None, signal.SIGABRT)
        return (not killed, self.when)

    def text(self) -> str:
        """The text after "rank N" in the error message."""
        if self.traceback is not None:
            return f"raised:\n\n{self.traceback.rstrip()}\n"
        if self.signal is not None:
            return f"was killed by {signal_name(self.signal)}"
        return f"ended with exit code {self.exitcode} before its function returned"

    def summary(self) -> str:
        """The same text in one line."""
        if self.traceback is None:
            return self.text()
        return f"raised: {self.traceback.rstrip().splitlines()[-1]}"


def known_signal(number: int) -> int:
    """The number as Python names it; of real-time signals it names the first and the last."""
    try:
        return signal.Signals(number)
    except ValueError:
        return number


def signal_name(number: int) -> str:
    """ "SIGKILL", "signal 40 (SIGRTMIN+6)"."""
    if isinstance(number, signal.Signals):
        return number.name
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"signal {number} (SIGRTMIN+{number - signal.SIGRTMIN})"
    return f"signal {number}"


class Child(Protocol):
    """The interface to a rank's process, for each way to start it."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Blocks until it ends. Returns the exit code, or minus the signal that killed it."""
        ...


@dataclass
class RankProcess:
    """One running rank. ``home`` delivers its one message; ``ending`` notifies of its end."""

    rank: int
    child: Child
    home: Connection | None
    ending: Ending = field(init=False)
    running: bool = field(default=True, init=False)
    result: bytes | None = field(default=None, init=False)
    failure: Failure | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        try:
            self.ending = Ending(self.child.pid)
        except BaseException:  # no other code can end the child
            os.kill(self.child.pid, signal.SIGKILL)
            self.child.wait()
            raise

    def sources(self) -> list[Any]:
        """The sources to wait on for this rank's message or end."""
        ended = self.ending.descriptor
        return [ended] if self.home is None else [self.home, ended]

    def hear(self, source: object) -> None:
        """Handles a source that is ready."""
        if source is self.home:
            self.receive()
        else:
            self.note_end()

    def receive(self) -> None:
        """Reads the rank's message, if there is a complete one."""
        # Asked first: a process that the rank left behind may hold the other end open for long.
        if self.home is None or not self.home.poll():
            return
        try:
            kind, *content = self.home.recv()
        except EOFError:
            kind, content = "nothing", []
        self.home.close()
        self.home = None
        if kind == "returned":
            (self.result,) = content
        elif kind == "raised":
            text, when = content
            self.failure = Failure(self.rank, when, traceback=text)

    def note_end(self) -> None:
        """Reaps the ended process; an end without a result, or a bad one after it, is a failure."""
        self.receive()
        exitcode = self.reap()
        if self.failure is None and (self.result is None or exitcode != 0):
            self.failure = Failure(self.rank, time.monotonic(), exitcode=exitcode)

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing once the process has been reaped: its pid may be another's by then."""
        if self.running:
            os.kill(self.child.pid, number)

    def reap(self) -> int:
        """Blocks until the process has ended; returns its exit code, or minus the signal."""
        exitcode = self.child.wait()
        self.running = False
        return exitcode

    def close(self) -> None:
        """Closes the file descriptors; kills the process if it still runs."""
        self.send_signal(signal.SIGKILL)
        self.reap()
        self.ending.close()
        if self.home is not None:
            self.home.close()
            self.home = None


def start_fresh(rank: int, variables: Mapping[str, str], pickled: bytes) -> RankProcess:
    """Starts a rank in a fresh interpreter.

    Not by multiprocessing: it cannot give a child its own environment (the OpenMP threads are
    counted when torch is loaded), and it would leave its resource tracker process behind.
    """
    home, to_parent = multiprocessing.Pipe(duplex=False)
    program = f"import runpy; runpy.run_path({str(Path(rank_main.__file__))!r}, None, '__main__')"
    with to_parent:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(to_parent.fileno()), str(os.getpid())],
            stdin=subprocess.PIPE,
            env={**os.environ, **variables},
            pass_fds=[to_parent.fileno()],
        )
    assert process.stdin is not None
    started = RankProcess(rank, process, home)
    try:
        with process.stdin as stdin:
            stdin.write(pickled)
    except BrokenPipeError:
        pass  # It died early: the watch over its end will find out how.
    return started


def start_forked(
    rank: int, variables: Mapping[str, str], job: rank_main.Job, gate: rank_main.Gate
) -> RankProcess:
    """Starts a rank as a copy of this process, which begins with a byte from ``gate``."""
    home, to_parent = multiprocessing.Pipe(duplex=False)
    parent_pid = os.getpid()

    def target() -> None:
        os.environ.update(variables)
        rank_main.run_rank(job, to_parent, parent_pid, gate)

    process = multiprocessing.get_context("fork").Process(target=target, name=f"rank {rank}")
    with to_parent, warnings.catch_warnings():
        # Python warns of forking a process with threads. The caller or default_start_method chose
        # it deliberately, and run_rank uses nothing that another thread could have locked.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=Warning)
        process.start()
    return RankProcess(rank, ForkedChild(process), home)


@dataclass(frozen=True)
class ForkedChild:
    """A forked process with the interface of :class:`Child`."""

    process: multiprocessing.process.BaseProcess

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    def wait(self) -> int:
        self.process.join()
        exitcode = self.process.exitcode
        assert exitcode is not None
        return exitcode
