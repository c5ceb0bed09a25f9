"""Messages between the ranks of a pipeline, received in any order, each in its step.

INVARIANT: a rank that waits accepts all messages that arrive (dreamcomm/messages/messenger.py). It
keeps those of its step and of later ones by their keys, and drops those of earlier steps.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from dreamcomm.messages.messenger import LOOK_MS, Arriving, Messenger
from dreamcomm.pipeline.errors import Failure
from dreamcomm.pipeline.messages.key import Key, Slot

__all__ = ["Channel", "PeerFailed"]

MODES = ("eval()", "step()")


class PeerFailed(Exception):
    """Another rank has stopped in this step."""

    def __init__(self, source: int, reason: Any) -> None:
        super().__init__(source, reason)
        self.source, self.reason = source, reason


class Channel:
    """One rank's end of the messages of a pipeline.

    Args:
        group: of all ranks of the pipeline's mesh. Peers are its ranks.
        tag: the first of two that the channel uses, equal on all ranks and no other's.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self.group = group
        self.messenger = Messenger.over(group, tag)
        self.rank, self.size = self.messenger.rank, self.messenger.size
        self._arrived: dict[tuple[int, tuple[int, ...]], Arriving] = {}
        self._step, self._mode, self._told = 0, 0, False
        self._failed: PeerFailed | None = None

    @property
    def sent_messages(self) -> int:
        """Messages sent so far."""
        return self.messenger.sent_messages

    @property
    def sent_bytes(self) -> int:
        """Bytes of them, with the descriptions."""
        return self.messenger.sent_bytes

    # Steps.

    def begin(self, step: int, mode: int) -> None:
        """Drops what is left of earlier steps. Messages of this one may have arrived already.

        Args:
            step: larger than the one before.
            mode: what the step does; it has to be equal on all ranks.
        """
        self._step, self._mode, self._told = step, mode, False
        self._arrived = {k: v for k, v in self._arrived.items() if k[1][0] >= step}
        self._failed = None
        for source, key in list(self._arrived):
            self._look_at(source, key)

    def end(self) -> None:
        """After a step: no message is awaited until the next one."""
        self.messenger.close(sends_end=self._failed is None and not self._told)

    @property
    def failure(self) -> Any:
        """Why a peer has stopped in this step, or None."""
        return None if self._failed is None else self._failed.reason

    def tell_failure(self, reason: Any) -> None:
        """Tells all peers that this rank has stopped in this step, and why. Once a step."""
        if self._told:
            return
        self._told = True
        for peer in range(self.size):
            if peer != self.rank:
                self.send(peer, Key(self._step, Slot.ERROR), reason)

    def done(self, value: Any) -> None:
        """Tells the group's rank 0 that this rank's part of the step is over."""
        self.send(0, Key(self._step, Slot.DONE), value)

    # Sending.

    def send(self, peer: int, key: Key, value: Any, *, may_change: bool = False) -> None:
        """Sends a value without waiting for its receive, unless many sends are under way.

        Raises:
            TypeError: a part of the value cannot be sent.
        """
        self.messenger.send(peer, key, value, self._mode, may_change=may_change)

    def drain(self) -> None:
        """Waits until the memory of all that was sent may change."""
        self.messenger.drain()

    # Receiving.

    def poll(self) -> None:
        """Accepts the messages that have arrived, and frees what has been sent.

        Raises:
            PeerFailed: a peer has stopped in this step.
        """
        while self._accept(0):
            pass
        self.messenger.forget_sent()
        if self._failed is not None:
            raise self._failed

    def receive(self, peer: int, key: Key, *, despite_failures: bool = False) -> Any:
        """The value that a peer sends under this key.

        Args:
            peer: the sender.
            key: of the message.
            despite_failures: wait on after a peer's error.

        Raises:
            PeerFailed: a peer has stopped in this step.
            RankLost: a rank has ended.
            RuntimeError: the group's timeout is over.
        """
        wanted = (peer, key)
        began = time.monotonic()
        while wanted not in self._arrived:
            if self._failed is not None and not despite_failures:
                raise self._failed
            if not self._accept(LOOK_MS):
                self._check_timeout(wanted, began)
        return self.messenger.value(self._arrived.pop(wanted))

    def receive_done(self, peer: int) -> Any:
        """What a peer gave to :meth:`done` in this step."""
        return self.receive(peer, Key(self._step, Slot.DONE), despite_failures=True)

    def _accept(self, milliseconds: int) -> bool:
        """Takes the next message, if its header is here within this time."""
        arriving = self.messenger.accept(milliseconds)
        if arriving is None:
            return False
        source, key = arriving.source, arriving.key  # equal to the Key, and found by it
        if key[0] < self._step:
            return True  # its works keep the memory until the bytes are there
        if (source, key) in self._arrived:
            raise RuntimeError(
                f"rank {source} has sent {Key(*key)} twice in one step; is the pipeline used by "  # type: ignore[arg-type]
                "two threads?"
            )
        self._arrived[source, key] = arriving
        self._look_at(source, key)
        return True

    def _look_at(self, source: int, key: tuple[int, ...]) -> None:
        """Notes a peer's error, and a peer that does something else in this step."""
        if key[0] != self._step or self._failed is not None:
            return
        arriving = self._arrived[source, key]
        if key[1] == Slot.ERROR:
            self._failed = PeerFailed(source, self.messenger.value(arriving))
        elif arriving.mark != self._mode:
            reason = Failure(
                source,
                "RuntimeError",
                f"it has called {MODES[arriving.mark]}, while rank {self.rank} has called "
                f"{MODES[self._mode]}; all ranks have to call the same",
            )
            self._failed = PeerFailed(source, reason)
            self.tell_failure(reason)

    def _check_timeout(self, wanted: tuple[int, Key], began: float) -> None:
        backend = self.messenger.backend
        assert backend is not None
        waited = time.monotonic() - began
        if waited > backend.options.timeout.total_seconds():
            peer, key = wanted
            raise RuntimeError(
                f"rank {self.rank} has waited {waited:.1f} s, the group's timeout, for rank {peer} "
                f"to send {key.slot.name} of micro-batch {key.microbatch} for stage {key.stage} in "
                f"step {key.step}"
            )
