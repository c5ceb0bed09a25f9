"""The code of one rank that :func:`dreamcomm.spawn` starts.

A fresh interpreter runs this file as its main program; a forked rank calls :func:`run_rank`.
Only the standard library is imported at the top: the connection to the parent must work before
large imports, or the user's code, can fail.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PR_SET_PDEATHSIG = 1
Gate = tuple[int, int]  # both ends of a pipe; a byte lets a rank begin
INTERRUPTED_EXIT = 128 + signal.SIGINT
FAILED_EXIT = 1


@dataclass(frozen=True)
class Job:
    """The user's call and the process group it runs in; the same for every rank."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backend: str
    timeout: timedelta | None
    options: Any
    threads: int | None
    init: bool

    def call(self) -> Any:
        """Initialises the default group if asked to, calls ``fn`` and leaves the group."""
        import torch
        import torch.distributed as dist

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if not self.init:
            return self.fn(*self.args, **self.kwargs)
        dist.init_process_group(self.backend, timeout=self.timeout, pg_options=self.options)
        result = self.fn(*self.args, **self.kwargs)
        if dist.is_initialized():
            dist.destroy_process_group()
        return result


def run_rank(job: Job | bytes, home: Connection, parent_pid: int, gate: Gate | None = None) -> None:
    """Runs the job and sends one message to the parent; ends the process itself after an error.

    With ``gate`` it begins when it reads a byte from there. It ends if the pipe is closed: then the
    parent was interrupted before it recorded this rank. ``job`` may be pickled; then errors in
    reading it are reported as well. The message is ``("returned", pickled value)`` or
    ``("raised", traceback, time.monotonic())``. All processes of a host share that clock, so the
    parent can find which rank failed first.
    """
    die_with_parent(parent_pid)
    interrupt_once()
    try:
        if gate is not None:
            reads, writes = gate
            os.close(writes)
            if not os.read(reads, 1):
                end_now(INTERRUPTED_EXIT)
            os.close(reads)
        if isinstance(job, bytes):
            job = read_job(job)
        message = ("returned", pickle_by_value(job.call()))
    except KeyboardInterrupt:
        end_now(INTERRUPTED_EXIT)
    except Exception as error:
        home.send(("raised", user_traceback(error), time.monotonic()))
        # Not sys.exit: destroying a failed group may wait for peers that never answer.
        end_now(FAILED_EXIT)
    home.send(message)
    home.close()


def user_traceback(error: BaseException) -> str:
    """The traceback from the user's first line on, without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def pickle_by_value(value: Any) -> bytes:
    """Plain pickle, so that a tensor is sent as bytes, not as a handle of this process."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"dreamcomm.spawn: the return value (a {type(value).__name__}) cannot be pickled: "
            f"{error}. Return plain data, arrays or tensors."
        ) from error


def read_job(pickled: bytes) -> Job:
    """Rebuilds the parent's ``sys.path`` and ``__main__``, then the job, which may need them."""
    from multiprocessing import spawn

    preparation, pickled_job = pickle.loads(pickled)
    # While the user's script is imported a second time, a call of dreamcomm.spawn that no
    # `if __name__ == "__main__":` guards must raise, not start ranks of ranks for ever.
    process: Any = multiprocessing.current_process()
    process._inheriting = True
    try:
        spawn.prepare(preparation)
    finally:
        del process._inheriting
    job: Job = pickle.loads(pickled_job)
    return job


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when the parent ends for any reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # It ended before the line above.
        end_now(FAILED_EXIT)


def interrupt_once() -> None:
    """Ignores a second SIGINT: one Ctrl-C arrives twice (terminal and parent)."""

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_now(status: int) -> None:
    """Flushes the output, and ends the process without clean-up by the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def main() -> None:
    """Arguments: the fd of the pipe to the parent, its pid. Standard input: the pickled job."""
    home_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    pickled = sys.stdin.buffer.read()
    # Several ranks cannot share a terminal's input: as in multiprocessing, they read nothing.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    run_rank(pickled, Connection(home_fd, readable=False), parent_pid)


if __name__ == "__main__":
    main()
