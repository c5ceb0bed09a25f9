"""Connections that jump over blocks of a pipeline, as in a U-Net.

The block that makes a value and the block that uses it share one :class:`Skip`. In one process it
just holds the value between the two. If they lie on different stages, the pipeline's runner takes
the value out after the first stage and puts it in before the second, on another rank (Kim et al.,
"torchgpipe", 2020, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["Skip", "find_skips"]


class Skip(nn.Module):
    """Carries a value from one block to a later one. It has no parameters.

    The value may be any pytree. Copies of a model made with ``copy.deepcopy`` share their own
    Skips in the same way; a value that is held is not copied, pickled or saved.

    Example::

        skip = Skip()
        down, up = Down(skip), Up(skip)   # Down.forward stashes, Up.forward pops
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: tuple[Any] | None = None

    @property
    def holds(self) -> bool:
        """True if a value is held."""
        return self._held is not None

    def stash(self, value: Any) -> None:
        """Keeps the value for the block that pops it.

        Raises:
            RuntimeError: if the value before was not popped.
        """
        if self._held is not None:
            raise RuntimeError(
                "stash() was called twice without a pop() between: each stashed value must be "
                "popped once, by a later block"
            )
        self._held = (value,)

    def pop(self) -> Any:
        """Returns the value and forgets it.

        Raises:
            RuntimeError: if there is none.
        """
        if self._held is None:
            raise RuntimeError(
                "pop() was called without a stash() before: the block that stashes must run "
                "earlier in the same forward pass and share this Skip"
            )
        (value,), self._held = self._held, None
        return value

    def give(self, value: Any) -> None:
        """Puts in a value that another stage has stashed. For the pipeline's runner.

        Raises:
            RuntimeError: if a value is held.
        """
        if self._held is not None:
            raise RuntimeError("a value arrived from another stage, but one is held already")
        self._held = (value,)

    def take(self) -> Any:
        """Takes the value out, to be sent to another stage. For the pipeline's runner.

        Raises:
            RuntimeError: if there is none: see :attr:`holds`.
        """
        if self._held is None:
            raise RuntimeError("there is no value to send: the stage did not call stash()")
        (value,), self._held = self._held, None
        return value

    def clear(self) -> None:
        """Forgets the value, if there is one."""
        self._held = None

    def extra_repr(self) -> str:
        return "full" if self.holds else "empty"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}


def find_skips(units: Mapping[str, nn.Module]) -> dict[str, Skip]:
    """Finds all Skips of a model.

    Args:
        units: the model's blocks by global name, in order. All ranks give the same.

    Returns:
        Each Skip once, by its name in the first block that has it.
    """
    found: dict[Skip, str] = {}
    for unit, module in units.items():
        for path, part in module.named_modules():
            if isinstance(part, Skip):
                found.setdefault(part, f"{unit}.{path}" if path else unit)
    return {name: skip for skip, name in found.items()}
