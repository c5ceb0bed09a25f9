"""Errors of model servers and their workers."""

from __future__ import annotations

from dreamcomm.ranks.errors import Error

__all__ = ["ServerError", "ServerLost", "ServerUnreachable"]


class ServerError(Error, RuntimeError):
    """A server has refused this worker, or has failed and told its workers why."""


class ServerLost(ServerError):
    """A server's process has ended, or the connection to it.

    :meth:`dreamcomm.server.Worker.reconnect` goes on with a new server of the same name.

    Attributes:
        index: of the server, from 0 on.
    """

    def __init__(self, text: str, index: int) -> None:
        super().__init__(text)
        self.index = index


class ServerUnreachable(ServerError):
    """No server of that name has registered, or the store cannot be reached."""
