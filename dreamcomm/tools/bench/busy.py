"""Busy processes that run beside the ranks, as on a machine that other programs use.

The interpreter of a busy process runs this file as its main program: only the standard library is
imported here.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RANK_MAIN = Path(__file__).parents[2] / "launch" / "rank_main.py"


class BusyProcessError(Exception):
    """A busy process did not start, or ended before the measurement was over."""


@contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """Runs ``count`` processes that compute until the end of the block; yields their ids.

    They have the priority and the cores of this process. The kernel ends them if it dies.

    Raises:
        BusyProcessError: fewer than ``count`` computed all the time.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(start())
        for process in started:
            wait_until_busy(process)
        yield [process.pid for process in started]
        for process in started:
            check_alive(process)
    finally:
        for process in started:
            process.kill()
            process.communicate()


def start() -> subprocess.Popen[bytes]:
    """Starts a fresh interpreter, since a fork would copy this process's memory and threads."""
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)


def wait_until_busy(process: subprocess.Popen[bytes]) -> None:
    """Raises BusyProcessError if it ends instead."""
    assert process.stdout is not None
    if not process.stdout.read(1):
        raise BusyProcessError(f"a busy process did not start: exit code {process.wait()}")


def check_alive(process: subprocess.Popen[bytes]) -> None:
    """Raises BusyProcessError for figures that were not all measured beside this process."""
    if process.poll() is not None:
        raise BusyProcessError(
            f"the busy process {process.pid} ended during the run, with exit code "
            f"{process.returncode}: run it again, with fewer busy processes if memory is short"
        )


def words(count: int) -> str:
    """Text for titles: "beside 2 busy processes"; empty for none."""
    return f"beside {count} busy process{'es' * (count > 1)}" if count else ""


def compute_for_ever() -> None:
    """The main function of a busy process; its argument is the parent's process id."""
    # An import from the package would import torch first.
    runpy.run_path(str(RANK_MAIN))["die_with_parent"](int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends it, without a traceback.
    os.write(sys.stdout.fileno(), b"!")
    while True:
        pass


if __name__ == "__main__":
    compute_for_ever()
