"""Whether this host can reach itself, as ranks of one host do to meet."""

from __future__ import annotations

import errno
import socket

__all__ = ["LOOPBACK", "check_loopback", "unreachable"]

LOOPBACK = "127.0.0.1"
SECONDS = 5.0  # for a connection that a firewall swallows; one that is refused fails at once


def check_loopback() -> None:
    """Connects to a port of its own. torch's store would try for minutes, and name other addresses.

    Raises:
        ConnectionError: it cannot; the text says what to look at.
        OSError: this process may open no more files.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection((LOOPBACK, port), timeout=SECONDS).close()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise unreachable(error) from error


def unreachable(why: Exception) -> ConnectionError:
    """The error for people."""
    return ConnectionError(
        f"{LOOPBACK} cannot be reached over TCP, where the ranks of one host meet: {why}. Look at "
        "the device lo (`ip address show lo`; `ip link set lo up` starts it) and at the firewall"
    )
