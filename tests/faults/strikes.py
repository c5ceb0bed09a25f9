"""What a rank does when the fault strikes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

ENDS = 60.0  # seconds after which a rank that has reported nothing counts as hung


@dataclass(frozen=True)
class Stage:
    """Where the victim is: what it may need."""

    struck: Any  # holds the time of the clock that all processes share
    released: Any  # an event, after which the victim may go on
    elsewhere: Any  # another group
    call: Callable[[], Any]  # that the others make
    folder: Path

    def note(self) -> None:
        self.struck.value = time.monotonic()


def die(number: int) -> Callable[[Stage], str]:
    def end(stage: Stage) -> str:
        os.kill(os.getpid(), number)
        return ""

    return end


def run_out_of_memory(stage: Stage) -> str:
    """In the memory cgroup that the test has made; the kernel's killer sends SIGKILL."""
    Path(stage.folder, "cgroup", "cgroup.procs").write_text(str(os.getpid()))
    hoard = []
    while True:
        stage.note()
        hoard.append(b"x" * (1 << 20))


def leave(stage: Stage) -> str:
    os._exit(3)


def sleep(stage: Stage) -> str:
    stage.released.wait(ENDS)
    return ""


def call_another_group(stage: Stage) -> str:
    """The order of two groups is another one than on the other ranks."""
    try:
        dist.barrier(stage.elsewhere)
    except RuntimeError as error:
        return str(error)
    return ""


def raise_error(stage: Stage) -> str:
    raise ArithmeticError("from the test")


def be_interrupted(stage: Stage) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(ENDS)
    return ""


def be_interrupted_inside(stage: Stage) -> str:
    """In its call, which the others make once that has happened."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        stage.note()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.2, interrupt).start()
    stage.call()
    return "the call has ended"


# What the victim does instead of its call, and the error that it was told there.
FAULTS: dict[str, Callable[[Stage], str]] = {
    "sleeps": sleep,
    "is in another group": call_another_group,
    "is stopped": die(signal.SIGSTOP),
    "kill -9": die(signal.SIGKILL),
    "out of memory": run_out_of_memory,
    "segfault": die(signal.SIGSEGV),
    "os._exit": leave,
    "exception": raise_error,
    "Ctrl-C": be_interrupted,
    "Ctrl-C inside": be_interrupted_inside,
}
LATE_FAULTS = ("sleeps", "is in another group", "is stopped")
# The victim goes on after these.
RETURNS = ("sleeps", "is in another group")
# The others come to the call when these have struck.
INSIDE = ("Ctrl-C inside",)
