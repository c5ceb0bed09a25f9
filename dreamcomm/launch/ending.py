"""Notifies of the end of a child process, and leaves it to be reaped."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

__all__ = ["Ending"]


class Ending:
    """``descriptor`` becomes readable when the child ends: a pidfd, or a pipe of a waiting thread.

    Sandboxes whose list of system calls is older than Linux 5.3 refuse a pidfd.

    Raises:
        OSError: this process may open no more files.
    """

    def __init__(self, pid: int) -> None:
        self._thread: threading.Thread | None = None
        try:
            self.descriptor = os.pidfd_open(pid)
        except OSError:
            self.descriptor = os.eventfd(0)
            self._thread = threading.Thread(
                target=self._wait, args=(pid,), name=f"dreamcomm waits for {pid}", daemon=True
            )
            self._thread.start()

    def _wait(self, pid: int) -> None:
        with suppress(ChildProcessError):  # it has been reaped
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        """Closes the descriptor. Before the child has ended it may block until then."""
        if self._thread is not None:
            self._thread.join()
        os.close(self.descriptor)
