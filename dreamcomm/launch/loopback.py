"""Checks that this host can connect to itself, as the bootstrap of ranks on one host does."""

from __future__ import annotations

import errno
import socket

__all__ = ["LOOPBACK", "check_loopback", "unreachable"]

LOOPBACK = "127.0.0.1"
SECONDS = 5.0  # limit for a connection that a firewall drops; a refused one fails at once


def check_loopback() -> None:
    """Connects to its own port. torch's store would try for minutes, and name other addresses.

    Raises:
        ConnectionError: it cannot; the text says what to check.
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
    """The error for the user."""
    return ConnectionError(
        f"{LOOPBACK} cannot be reached over TCP, as the ranks of one host need: {why}. Check the "
        "device lo (`ip address show lo`; `ip link set lo up` starts it) and the firewall"
    )
