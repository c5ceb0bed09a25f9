"""Methods that are for one thread at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["one_thread"]


def one_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses a call while another thread is in one: they would read each other's messages.

    The object has a lock ``_in_call``, which its own calls may take again.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._in_call.acquire(blocking=False):
            name = f"{type(self).__name__}.{method.__name__}"
            raise RuntimeError(
                f"{name}: another thread is in a call of this object, which is for one thread at a "
                "time"
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self._in_call.release()

    return call
