"""Notices that load_state_dict has given a model other weights between two steps."""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

__all__ = ["Loads"]


class Loads:
    """Compares a model's parameters with those before its first load_state_dict since a step.

    So weights that an evaluation swaps in and back are no change, and nothing is computed where no
    weights are loaded.

    Args:
        module: has the parameters.
        names: of the parameters.
        parameters: that matter.
    """

    def __init__(
        self, module: nn.Module, names: Sequence[str], parameters: Sequence[Tensor]
    ) -> None:
        self._names, self._parameters = names, parameters
        self._before: list[bytes] | None = None
        self._ignores = False
        hook = _Hook(self)
        owners = [part for part in module.modules() if part._parameters]
        for part in cast(list[Any], owners):  # torch's method has no types
            part.register_load_state_dict_pre_hook(hook)

    def note(self) -> None:
        """Notes the parameters, before load_state_dict writes into one of them."""
        if self._before is None and not self._ignores:
            self._before = _digests(self._parameters)

    def changed(self) -> str:
        """The name of a parameter with other bits than before the loads; "" if there is none."""
        if self._before is None:
            return ""
        now = _digests(self._parameters)
        pairs = zip(self._names, self._before, now, strict=True)
        return next((name for name, before, after in pairs if before != after), "")

    def forget(self) -> None:
        """Begins anew, after a step."""
        self._before, self._ignores = None, False

    def expect(self) -> None:
        """Ignores loads until the next step: they are of the checkpoint that is being loaded."""
        self._before, self._ignores = None, True


class _Hook:
    """Runs before load_state_dict writes. That of a copy of the module does nothing."""

    def __init__(self, loads: Loads | None = None) -> None:
        self._loads = None if loads is None else weakref.ref(loads)

    def __call__(self, *_: Any) -> None:
        loads = None if self._loads is None else self._loads()
        if loads is not None:
            loads.note()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _digests(tensors: Sequence[Tensor]) -> list[bytes]:
    """Digests of each tensor's bits."""
    return [_digest(one.detach()) for one in tensors]


def _digest(tensor: Tensor) -> bytes:
    data = tensor.to("cpu").contiguous()
    if not data.numel():
        return b""
    memory = (ctypes.c_char * data.nbytes).from_address(data.data_ptr())
    return hashlib.blake2b(memory, digest_size=16).digest()
