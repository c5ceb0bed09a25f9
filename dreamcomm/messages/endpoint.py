"""What carries messages: the same for a messenger, whether ranks share memory or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor

from dreamcomm.messages.codec import Described
from dreamcomm.ranks.errors import RankLost

__all__ = ["LOOK_MS", "Arriving", "Endpoint"]

LOOK_MS = 100  # how often a waiting rank checks that its peers live
MOMENT = timedelta(milliseconds=LOOK_MS)


@dataclass
class Arriving:
    """A message whose header is here.

    Attributes:
        source: the sender.
        key: four numbers, as the sender gave them.
        mark: a small number beside the key.
        works: the receives of its tensors that are under way.
    """

    source: int
    key: tuple[int, ...]
    mark: int
    what: Described
    tensors: list[Tensor]
    works: list[Any]


class Endpoint(ABC):
    """One rank's end of what carries the messages of a group.

    Works, of sends and of receives, have ``is_completed()``, which does not wait, and
    ``wait(time)``, which raises RuntimeError if the work has failed or is not done in time.

    Args:
        rank, size: of the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.peers = [peer for peer in range(size) if peer != rank]

    @property
    @abstractmethod
    def timeout(self) -> float:
        """The group's, in seconds."""

    # Sending.

    def place(self, description: int, tensors: Sequence[Tensor]) -> Sequence[int]:
        """Puts tensors where their receiver takes them from; -1: it has to be sent.

        Args:
            description: bytes of it, which go beside the places.
            tensors: of the message.

        Returns:
            The places. Empty: all have to be sent.
        """
        return ()

    @abstractmethod
    def forget_placed(self) -> None:
        """Frees what receivers have taken."""

    @abstractmethod
    def send_header(
        self, peer: int, key: tuple[int, ...], description: bytes, offsets: Sequence[int]
    ) -> bool:
        """Sends a header; returns whether the description was in it. If not, it has to be sent."""

    @abstractmethod
    def send(self, tensor: Tensor, peer: int) -> Any:
        """The work of a send."""

    @abstractmethod
    def pending(self) -> int:
        """Headers that are under way. Raises the error of one that failed."""

    # Receiving.

    @abstractmethod
    def next(self, milliseconds: int) -> Arriving | None:
        """The next message of any peer, if its header is here within this time.

        Raises:
            RuntimeError: the group has failed.
        """

    @abstractmethod
    def close(self, *, sends_end: bool) -> None:
        """See :meth:`Messenger.close`."""

    def leave(self) -> None:
        """See :meth:`Messenger.leave`."""
        self.close(sends_end=False)

    # Peers.

    @abstractmethod
    def has_ended(self, peer: int) -> bool:
        """Whether a peer's process is known to have ended."""

    @abstractmethod
    def departure(self, peer: int) -> str:
        """Why the peer can send no more; "" if it can, as far as is known."""

    @abstractmethod
    def end_looks(self) -> None:
        """Ends what :meth:`departure` has under way, when a wait is over."""

    def check_lost(self) -> None:
        """Raises RankLost if a peer is known to be lost."""
        for peer in self.peers:
            if self.has_ended(peer):
                raise RankLost(peer)

    def waited(self, work: Any) -> bool:
        """Waits a moment; whether the work is done. Raises its error, or RankLost."""
        try:
            work.wait(MOMENT)
        except RuntimeError:
            self.check_lost()
            if not work.is_completed():
                return False
            # It may have ended since the time to look: then its own result counts.
            work.wait(MOMENT)
        return True
