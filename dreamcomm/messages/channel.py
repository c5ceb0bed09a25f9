"""What channels of all ways of training share: messages by their keys, failures, waits that end."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dreamcomm.messages.endpoint import LOOK_MS, Arriving
from dreamcomm.messages.messenger import Messenger
from dreamcomm.ranks.errors import RankLeft, RankLost

__all__ = ["KeyedChannel", "WaitedTooLong", "Wanted"]

Wanted = tuple[int, tuple[int, ...]]  # a peer, and the key of its message


class WaitedTooLong(RuntimeError):
    """A message has not come within the group's timeout.

    Attributes:
        seconds: that were waited.
    """

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds


class KeyedChannel(ABC):
    """One rank's messages of one kind, received in any order. For one thread at a time.

    INVARIANT: a rank that waits takes all messages that arrive (messenger.py), and keeps by their
    keys those that a subclass does not take itself. So a failure of a peer, which is a message,
    ends every wait.

    Attributes:
        failed: the failure that a peer has told, or None.
    """

    def __init__(self, messenger: Messenger) -> None:
        self.messenger = messenger
        self.rank, self.size, self.peers = messenger.rank, messenger.size, messenger.peers
        self._arrived: dict[Wanted, Arriving] = {}
        self.failed: Exception | None = None
        self._looks = False  # whether departure() was asked in this wait

    @property
    def sent_messages(self) -> int:
        """Messages sent so far."""
        return self.messenger.sent_messages

    @property
    def sent_bytes(self) -> int:
        """Bytes of them, with the descriptions."""
        return self.messenger.sent_bytes

    # Sending.

    def drain(self) -> None:
        """Waits until the memory of all that was sent may change."""
        self.messenger.drain()

    def tell_peers(self, tell: Callable[[int], None]) -> None:
        """Tells each peer that this rank has failed. Those that have left hear nothing."""
        for peer in self.peers:
            with suppress(RuntimeError, RankLost):
                tell(peer)

    # Receiving.

    def poll(self) -> None:
        """Takes the messages that have arrived, and frees what has been sent."""
        while self.take_next(0):
            pass
        self.messenger.forget_sent()

    def take_next(self, milliseconds: int) -> bool:
        """Takes the next message, if its header is here within this time."""
        arriving = self.messenger.accept(milliseconds)
        if arriving is None:
            return False
        if self.keeps(arriving):
            self._arrived[arriving.source, arriving.key] = arriving
        return True

    @abstractmethod
    def keeps(self, arriving: Arriving) -> bool:
        """Looks at a message that has come; whether it is kept until it is received."""

    def receive(self, peer: int, key: tuple[int, ...], *, despite_failures: bool = False) -> Any:
        """The value that a peer sends under this key. It can be received once.

        Args:
            peer: the sender.
            key: of the message.
            despite_failures: wait on after a peer's failure.

        Raises:
            Exception: :attr:`failed`.
            RankLost: a rank has ended, or this peer has left the group.
            WaitedTooLong: the group's timeout is over.
            RuntimeError: the group has failed.
        """
        wanted = (peer, key)
        begin = time.monotonic()
        while wanted not in self._arrived:
            if self.failed is not None and not despite_failures:
                raise self.failed
            self.wait_for(wanted, begin)
        return self.messenger.value(self._arrived.pop(wanted))

    def wait_for(self, wanted: Wanted, begin: float) -> None:
        """Takes the next message, or looks whether the wanted one can still come.

        Raises:
            RankLost, WaitedTooLong, RuntimeError: as of :meth:`receive`.
        """
        if not self.take_next(LOOK_MS):
            self._looks = True
            self._check_wait(wanted, begin)
        elif self._looks:
            self._looks = False
            self.messenger.end_looks()

    def _check_wait(self, wanted: Wanted, begin: float) -> None:
        """Raises if the peer has left the group, or the group's timeout is over."""
        why = self.messenger.departure(wanted[0])
        if why and not self.take_next(0):  # what it has sent before would be here
            raise RankLeft(wanted[0], why)
        waited = time.monotonic() - begin
        if waited > self.messenger.timeout:
            raise WaitedTooLong(
                f"rank {self.rank} has waited {waited:.1f} s, the group's timeout, for rank "
                f"{wanted[0]} to send {self.described(wanted[1])}",
                waited,
            )

    @abstractmethod
    def described(self, key: tuple[int, ...]) -> str:
        """What a message under this key is, for errors."""
