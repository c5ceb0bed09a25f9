"""Works of Gloo that can be asked whether they are done."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

__all__ = ["FOR_EVER", "OfDevice", "Sent"]

FOR_EVER = timedelta(days=365)


class Sent:
    """A send that another thread waits for. Its fields are under the endpoint's lock."""

    def __init__(self, work: Any, peer: int, changed: threading.Condition) -> None:
        self.work, self.peer, self._changed = work, peer, changed
        self.done, self.error = False, ""

    def is_completed(self) -> bool:
        return self.done

    def wait(self, patience: timedelta = FOR_EVER) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, patience.total_seconds()):
                raise RuntimeError(f"rank {self.peer} has not taken what was sent")
        if self.error:
            raise RuntimeError(self.error)


class OfDevice:
    """A work of a device's own backend, whose wait only orders the device's streams."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, _: timedelta = FOR_EVER) -> None:
        self._work.wait()
