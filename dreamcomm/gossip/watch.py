"""Notices that a peer has left the group, while this rank waits for it."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

__all__ = ["PeerWatch"]

MOMENT = timedelta(milliseconds=1)


class PeerWatch:
    """Receives that no peer sends for, so that they end only when a peer cannot send any more.

    A receive from any source goes on while some other peer is left, so it does not notice a peer
    that has destroyed its group. A receive from one peer does, and says how it has left. It stays
    posted until the group ends.

    Args:
        backend: dreamcomm's, of the group.
        tag: of the receives; no message has it.
    """

    def __init__(self, backend: Any, tag: int) -> None:
        self._backend, self._tag = backend, tag
        self._posted: dict[int, tuple[Any, float]] = {}  # with the time

    def departure(self, peer: int) -> str:
        """Why the peer can send no more; "" if it can, as far as is known."""
        if peer not in self._posted:
            nothing = torch.empty(1, device="cpu")
            work = self._backend.recv([nothing], peer, self._tag)
            self._posted[peer] = (work, time.monotonic())
        work, begin = self._posted[peer]
        with suppress(RuntimeError):  # not done within the moment, or failed
            work.wait(MOMENT)
        if not work.is_completed():
            return ""
        del self._posted[peer]
        timeout: float = self._backend.options.timeout.total_seconds()
        if time.monotonic() - begin > timeout / 2:
            return ""  # the receive itself has reached the group's timeout: the next one says more
        try:
            work.wait()
        except RuntimeError as error:
            return str(error)
        return "it has sent under a tag of Gossip"
