"""Messages between the ranks of a group, taken in the order in which they arrive.

A message is a header and the tensors that it describes. Headers of one peer arrive in the order in
which it sent them. In a group of dreamcomm (shared_endpoint.py) a tensor is placed: its sender
copies it into its heap, and its receiver copies it from there, with nothing to wait for on either
side (csrc/c10d/messages). Where too much is placed already, or there is no heap that peers map, it
is sent: the receiver posts a receive for it once it has the header. Over Gloo (gloo_endpoint.py)
threads receive.

INVARIANT (matching): a sender issues the header of a message and then its tensors, from one thread,
and all tensors under one tag. A receiver posts receives for a peer's tensors in the order of that
peer's headers, whether or not it wants them. So the n-th tensor that is sent to a rank is the n-th
that it receives from that peer, and a message can be dropped without confusing those behind it.
Placed tensors are taken when their header is read.

INVARIANT (no deadlock by order): a rank that waits, for a message or for a send to end, accepts all
messages that arrive. So a send ends as soon as its receiver waits for anything, and what a rank
waits for never depends on the order in which its peer posted messages.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from dreamcomm.messages.codec import Codec, assembled
from dreamcomm.messages.endpoint import LOOK_MS, Arriving, Endpoint
from dreamcomm.ranks.errors import RankLeft

__all__ = ["MOST_SENDS", "Messenger"]

MOST_SENDS = 64  # works under way, of headers and of tensors
MOST_TOLD = 800  # bytes of a text, which a header holds
LOOKS = 0.25  # seconds: a peer's departure may be seen after the error that it causes


class Messenger:
    """One rank's end of the messages of a group. For one thread at a time.

    The contract is one, whatever carries the messages:

    - **Arrival.** :meth:`accept` with a time of 0 takes a message that has come and waits for none.
    - **Order.** Messages of one peer are accepted in the order in which it sent them.
    - **Sends.** :meth:`send` waits only if MOST_SENDS are under way. Tensors must not change before
      :meth:`drain`, and :meth:`forget_sent` frees what has been taken.
    - **Time.** A wait ends after the time that is given. A wait for a certain message has no limit
      here: the caller looks at :attr:`timeout`, which is the group's. A signal ends a wait.
    - **Loss.** A peer whose process ends is a :class:`RankLost` within LOOK_MS in every wait. What
      it sent before can be accepted first, without a time. Between nodes the end of a process may
      take along what this rank has not received yet: its values raise the loss, too.
    - **Departure.** A peer that leaves the group is told by :meth:`departure`. It is a
      :class:`RankLeft` in waits if no other peer is left. Over Gloo a process that ends cannot be
      told from a connection that ends, so both are a RankLeft in every wait.
    - **Sessions.** After :meth:`close` nothing is received until the next call. All ranks close
      equally often, and one that fails for good calls :meth:`leave`.

    Args:
        endpoint: what carries them.
        codec: the endpoint's.
    """

    def __init__(self, endpoint: Endpoint, codec: Codec) -> None:
        self.rank, self.size, self.endpoint = endpoint.rank, endpoint.size, endpoint
        self.sent_bytes = self.sent_messages = 0
        self._codec = codec
        self._send_header, self._pending, self._take = (
            endpoint.send_header,
            endpoint.pending,
            endpoint.next,
        )
        self._sends: deque[Any] = deque()
        self._inbox: deque[Arriving] = deque()  # accepted while this rank waited for a send

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return self.endpoint.peers

    @property
    def timeout(self) -> float:
        """The group's, in seconds."""
        return self.endpoint.timeout

    # Sending.

    def send(
        self,
        peer: int,
        key: tuple[int, ...],
        value: Any,
        mark: int = 0,
        *,
        may_change: bool = False,
    ) -> None:
        """Sends a value without waiting for its receive, unless many sends are under way.

        Args:
            peer: the receiver, another rank.
            key: four numbers for the receiver.
            value: a tree of tensors and other values that can be pickled.
            mark: a small number for the receiver, from 0 on.
            may_change: the caller may write to the tensors before the receiver has taken them:
                what is sent from where it lies is copied first.

        Raises:
            TypeError: a part of the value cannot be sent.
            RankLost: a rank has ended, or has left the group.
            RuntimeError: the group has failed.
        """
        data, tensors, simple = self._codec.encode(value)
        try:
            offsets = self.endpoint.place(len(data), tensors)
            inside = self._send_header(peer, (*key, 2 * mark + simple), data, offsets)
            if not inside:
                self._issue(torch.frombuffer(bytearray(data), dtype=torch.uint8), peer)
            for tensor, offset in zip(tensors, offsets or repeat(-1), strict=False):
                if offset >= 0:
                    self.sent_bytes += tensor.nbytes
                elif tensor.numel():
                    self._issue(tensor.clone() if may_change else tensor, peer)
            self.sent_messages += 1
            self.sent_bytes += len(data)
            self._bound_sends()
        except RuntimeError as error:
            self._check_peers(error, LOOKS)
            raise

    def tell(self, peer: int, key: tuple[int, ...], text: str) -> None:
        """Sends a text, and waits for nothing, however many sends are under way.

        It travels in the header, so that it arrives also if this rank leaves at once, unless the
        peer has left more headers before it than the transport holds. What a header does not hold
        is cut.

        Raises:
            RuntimeError: the group has failed, or the peer has left it.
        """
        data, _, simple = self._codec.encode(_cut(text))
        self._send_header(peer, (*key, int(simple)), data, ())
        self.sent_messages += 1
        self.sent_bytes += len(data)

    def _issue(self, tensor: Tensor, peer: int) -> None:
        self._sends.append(self.endpoint.send(tensor, peer))
        self.sent_bytes += tensor.nbytes

    def _bound_sends(self) -> None:
        self.forget_sent()
        while len(self._sends) + self._pending() > MOST_SENDS:
            self._admit(LOOK_MS if self._pending() else 0)
            if self._sends and self.endpoint.waited(self._sends[0]):
                self._sends.popleft()

    def forget_sent(self) -> None:
        """Frees what receivers have taken.

        Raises:
            RankLost, RuntimeError: as of :meth:`send`.
        """
        try:
            while self._sends and self._sends[0].is_completed():
                self._sends.popleft().wait()
        except RuntimeError as error:
            self._check_peers(error)
            raise
        self.endpoint.forget_placed()

    def drain(self) -> None:
        """Waits until the memory of all that was sent may change.

        Raises:
            RankLost: a rank has ended.
        """
        while self._sends:
            while self._admit(0):
                pass
            if self.endpoint.waited(self._sends[0]):
                self._sends.popleft()

    def close(self, *, sends_end: bool = True) -> None:
        """Ends a session: no message is awaited until the next :meth:`accept` or :meth:`send`.

        Args:
            sends_end: whether all that was sent will be received. Then this rank may end at once:
                what its end would lose is waited for.

        Raises:
            RankLost, RuntimeError: as of :meth:`send`.
        """
        if sends_end:
            self.drain()
        if self.peers:
            self.endpoint.close(sends_end=sends_end)

    def leave(self) -> None:
        """Ends the last session. Peers still get what was told to them."""
        if self.peers:
            self.endpoint.leave()

    # Receiving.

    def accept(self, milliseconds: int) -> Arriving | None:
        """The next message of any peer, if its header is here within this time.

        Raises:
            RankLost: a rank has ended; not if the time is 0.
            RuntimeError: the group has failed.
        """
        return self._inbox.popleft() if self._inbox else self._next(milliseconds)

    def value(self, arriving: Arriving) -> Any:
        """The value of a message, when its tensors are here.

        Raises:
            RankLost: a rank has ended.
            RuntimeError: the group has failed.
        """
        try:
            for work in arriving.works:
                while not self.endpoint.waited(work):
                    pass
        except RuntimeError as error:
            self._check_peers(error)
            raise
        return assembled(arriving.what, arriving.tensors)

    def check_lost(self) -> None:
        """Raises RankLost if a rank is known to have ended."""
        self.endpoint.check_lost()

    def departure(self, peer: int) -> str:
        """Why the peer can send no more; "" if it can, as far as is known.

        What it sent before may be here, and not accepted yet.
        """
        return self.endpoint.departure(peer)

    def end_looks(self) -> None:
        """Ends what :meth:`departure` has under way, when a wait is over."""
        self.endpoint.end_looks()

    def _admit(self, milliseconds: int) -> bool:
        """Takes the next message into the inbox, if it is here within this time."""
        found = self._next(milliseconds)
        if found is None:
            return False
        self._inbox.append(found)
        return True

    def _next(self, milliseconds: int) -> Arriving | None:
        if self.size == 1:
            return None
        try:
            found = self._take(milliseconds)
        except RuntimeError as error:
            found = self._next_after(error, milliseconds)
        if found is None and milliseconds:
            self.endpoint.check_lost()
        return found

    def _next_after(self, error: RuntimeError, milliseconds: int) -> Arriving | None:
        """Asks once more: a receive that is older than the group's timeout has ended by that.

        A group that has failed, or that all others have left, says so again.
        """
        self.endpoint.check_lost()
        try:
            return self.endpoint.next(milliseconds)
        except RuntimeError:
            self._check_peers(error)
            raise

    def _check_peers(self, error: RuntimeError, seconds: float = 0.0) -> None:
        """Raises if the error comes from the loss or the departure of a peer.

        ``seconds``: a departure may be seen so much later. Not after a timeout: then the peer may
        leave because of the same one.
        """
        until = time.monotonic() + seconds
        while True:
            self.endpoint.check_lost()
            for peer in self.peers:
                if why := self.endpoint.departure(peer):
                    self.endpoint.check_lost()  # its process has ended meanwhile
                    raise RankLeft(peer, why) from error
            if time.monotonic() >= until:
                break
            time.sleep(0.001)
        self.endpoint.end_looks()


def _cut(text: str) -> str:
    """At most MOST_TOLD bytes of a text."""
    data, mark = text.encode(errors="replace"), " ... (cut)"
    if len(data) <= MOST_TOLD:
        return text
    return data[: MOST_TOLD - len(mark)].decode(errors="ignore") + mark
