"""Messages between the ranks of a pipeline, received in any order, each in its step.

Messages of this step and of later ones are kept by their keys, those of earlier steps are dropped.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dreamcomm.messages.channel import KeyedChannel
from dreamcomm.messages.endpoint import Arriving
from dreamcomm.messages.over import messenger_over
from dreamcomm.pipeline.errors import Failure
from dreamcomm.pipeline.messages.key import Key, Slot

__all__ = ["Channel", "PeerFailed"]

MODES = ("eval()", "step()")


class PeerFailed(Exception):
    """Another rank has stopped in this step."""

    def __init__(self, source: int, reason: Any) -> None:
        super().__init__(source, reason)
        self.source, self.reason = source, reason


class Channel(KeyedChannel):
    """One rank's end of the messages of a pipeline.

    Args:
        group: of all ranks of the pipeline's mesh. Peers are its ranks.
        tag: the first of a unit, equal on all ranks and no other's.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        super().__init__(messenger_over(group, tag))
        self.group = group
        self._step, self._mode, self._told = 0, 0, False

    # Steps.

    def begin(self, step: int, mode: int) -> None:
        """Drops what is left of earlier steps. Messages of this one may have arrived already.

        Args:
            step: larger than the one before.
            mode: what the step does; it has to be equal on all ranks.
        """
        self._step, self._mode, self._told = step, mode, False
        self._arrived = {k: v for k, v in self._arrived.items() if k[1][0] >= step}
        self.failed = None
        for arriving in list(self._arrived.values()):
            self._look_at(arriving)

    def end(self) -> None:
        """After a step: no message is awaited until the next one."""
        self.messenger.close(sends_end=self.failed is None and not self._told)

    @property
    def failure(self) -> Any:
        """Why a peer has stopped in this step, or None."""
        return self.failed.reason if isinstance(self.failed, PeerFailed) else None

    def tell_failure(self, reason: Any) -> None:
        """Tells all peers that this rank has stopped in this step, and why. Once a step."""
        if not self._told:
            self._told = True
            self.tell_peers(lambda peer: self.send(peer, Key(self._step, Slot.ERROR), reason))

    def done(self, value: Any) -> None:
        """Tells the group's rank 0 that this rank's part of the step is over."""
        self.send(0, Key(self._step, Slot.DONE), value)

    # Messages.

    def send(self, peer: int, key: Key, value: Any, *, may_change: bool = False) -> None:
        """Sends a value without waiting for its receive, unless many sends are under way.

        Raises:
            TypeError: a part of the value cannot be sent.
        """
        self.messenger.send(peer, key, value, self._mode, may_change=may_change)

    def poll(self) -> None:
        """Takes the messages that have arrived, and frees what has been sent.

        Raises:
            PeerFailed: a peer has stopped in this step.
        """
        super().poll()
        if self.failed is not None:
            raise self.failed

    def receive_done(self, peer: int) -> Any:
        """What a peer gave to :meth:`done` in this step."""
        return self.receive(peer, Key(self._step, Slot.DONE), despite_failures=True)

    def keeps(self, arriving: Arriving) -> bool:
        key = arriving.key  # equal to the Key, and found by it
        if key[0] < self._step:
            return False  # its works keep the memory until the bytes are there
        if (arriving.source, key) in self._arrived:
            raise RuntimeError(
                f"rank {arriving.source} has sent {Key(*key)} twice in one step; is the pipeline "  # type: ignore[arg-type]
                "used by two threads?"
            )
        if arriving.mark != self._mode or key[1] == Slot.ERROR:
            self._look_at(arriving)
        return True

    def _look_at(self, arriving: Arriving) -> None:
        """Notes a peer's error, and a peer that does something else in this step."""
        source, (step, slot, _, _) = arriving.source, arriving.key
        if step != self._step or self.failed is not None:
            return
        if slot == Slot.ERROR:
            self.failed = PeerFailed(source, self.messenger.value(arriving))
        elif arriving.mark != self._mode:
            reason = Failure(
                source,
                "RuntimeError",
                f"it has called {MODES[arriving.mark]}, while rank {self.rank} has called "
                f"{MODES[self._mode]}; all ranks have to call the same",
            )
            self.failed = PeerFailed(source, reason)
            self.tell_failure(reason)

    def described(self, key: tuple[int, ...]) -> str:
        step, slot, stage, microbatch = key
        return f"{Slot(slot).name} of micro-batch {microbatch} for stage {stage} in step {step}"
