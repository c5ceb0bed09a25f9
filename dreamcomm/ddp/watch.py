"""Notices that a wrapped module has got other parameters or buffers since it was wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.ranks.parameters import check_equal_buffers

__all__ = ["BufferWatch", "ModuleWatch"]


class ModuleWatch:
    """Compares the parameters and submodules of a module with those that were there before.

    A look takes some 50 ns for each of them: ids of what the module's own dicts hold.

    Args:
        module: with all that is below it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._real = self._look(module)

    def has_changed(self, module: nn.Module) -> bool:
        """Whether parameters or submodules were added, replaced or removed since the last call.

        ``torch.func.functional_call`` puts tensors that are no parameters in their places for a
        time: gradients then reach the parameters through them, and nothing has changed.
        """
        if self._ids() == self._seen:
            return False
        before, found = self._real, self._look(module)
        if len(before) == len(found):
            pairs = zip(before, found, strict=True)
            found = [one if _is_stand_in(now) else now for one, now in pairs]
        self._real = found
        return [*map(id, before)] != [*map(id, found)]

    def has_buffers(self) -> bool:
        """Whether there is any buffer below the module, as it was at the last look."""
        return any(self._buffers)

    def _look(self, module: nn.Module) -> list[object]:
        parts = list(module.modules())
        self._dicts: list[dict[str, Any]] = [part._parameters for part in parts]
        self._dicts += [part._modules for part in parts]
        self._buffers = [part._buffers for part in parts]
        self._seen = self._ids()
        # While these are kept, no other object gets the id of one.
        self._kept: list[object] = list(chain.from_iterable(map(dict.values, self._dicts)))
        return self._kept

    def _ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._dicts))))


def _is_stand_in(one: object) -> bool:
    return isinstance(one, Tensor) and not isinstance(one, nn.Parameter)


class BufferWatch:
    """Compares the ranks' buffers again when they have changed, before rank 0's replace others'.

    Args:
        group: its ranks have the buffers of rank 0.
        what: is made of the module, for errors.
        buffers: what ranks have been found to have in common, with names.
    """

    def __init__(
        self, group: dist.ProcessGroup, what: str, buffers: Iterable[tuple[str, Tensor]]
    ) -> None:
        self._group, self._what = group, what
        self._agreed = _described(buffers)

    def check(self, buffers: Sequence[tuple[str, Tensor]]) -> None:
        """Raises ValueError on all ranks where they have changed and differ. Collective then."""
        now = _described(buffers)
        if now == self._agreed:
            return
        check_equal_buffers(self._group, buffers, self._what)
        self._agreed = now


def _described(buffers: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Any, Any]]:
    return [(name, one.shape, one.dtype) for name, one in buffers]
