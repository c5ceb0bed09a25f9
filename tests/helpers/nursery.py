"""Starts ranks' processes: forks them from one that has imported torch, because importing it takes
longer than a test."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")


class Child:
    """A process that the nursery has forked off."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.status: int | None = None  # as subprocess.Popen.returncode

    def wait(self) -> int:
        if self.status is None:
            self.status = self._nursery.request({"wait": self.pid})
        return self.status

    def is_alive(self) -> bool:
        if self.status is None:
            self.status = self._nursery.request({"poll": self.pid})
        return self.status is None

    def send_signal(self, number: int) -> None:
        if self.status is None:  # else the number may be another process's by now
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """Started at the first fork; ends with close(), or with this process."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, log: Path, connection: socket.socket) -> Child:
        """A worker (worker.py) at the other end of ``connection``, which writes to ``log``."""
        with log.open("wb") as output:
            files = [connection.fileno(), output.fileno()]
            return Child(self, self.request({"fork": dict(os.environ)}, files))

    def request(self, what: dict[str, object], files: list[int] | None = None) -> int:
        if self._socket is None:
            self._start()
        assert self._socket is not None
        socket.send_fds(self._socket, [pickle.dumps(what)], files or [])
        answer = self._socket.recv(1 << 16)
        if not answer:
            raise RuntimeError("the process that ranks are forked off has ended")
        return pickle.loads(answer)  # type: ignore[no-any-return]

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the tests, which end this process
                env=env,
            )

    def close(self) -> None:
        if self._process is None or self._socket is None:
            return
        self._socket.close()
        self._process.wait()
