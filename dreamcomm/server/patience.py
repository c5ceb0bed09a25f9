"""Messages of a group that shares no memory, and of which one rank computes for long."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor

__all__ = ["FOR_EVER", "PatientGroup"]

FOR_EVER = timedelta(days=365)


class PatientGroup:
    """Sends and receives of a group of two whose waits end with the message, or with the peer.

    Gloo ends a wait without a time after the group's timeout, and the connection with it. That
    timeout is for the connection's begin: what a worker computes between two messages may take
    longer. And a receive from any source does not end when a peer does.

    Args:
        backend: of tensors on the CPU.
        peer: the other's rank.
    """

    def __init__(self, backend: Any, peer: int) -> None:
        self._backend, self._peer = backend, peer

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """A work that is waited for as long as it takes."""
        return _Patient(self._backend.send(tensors, peer, tag), peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """A work that is waited for as long as it takes."""
        return _Patient(self._backend.recv(tensors, peer, tag), peer)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """A work that is waited for as long as it takes."""
        return self.recv(tensors, self._peer, tag)


class _Patient:
    def __init__(self, work: Any, peer: int) -> None:
        self._work, self._peer = work, peer

    def wait(self) -> bool:
        return bool(self._work.wait(FOR_EVER))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def _source_rank(self) -> int:
        return self._peer
