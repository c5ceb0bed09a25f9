"""Says in plain words why a forward cannot be traced, and at which line."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import nn

from dreamcomm.ranks.errors import Error

__all__ = ["TraceError", "trace_error"]

_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


class TraceError(Error, ValueError):
    """A forward that cannot be traced."""


def trace_error(module: nn.Module, error: Exception) -> TraceError:
    """Makes the error to raise.

    Args:
        module: that was traced.
        error: what its trace raised.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OWN, _TORCH))
    ]
    where = ""
    if frames:
        last = frames[-1]
        where = f" at {Path(last.filename).name}:{last.lineno}, `{last.line}`"
    return TraceError(
        f"cannot split {type(module).__name__}: its forward cannot be followed{where}: "
        f"{_reason(error)}. Give the stages as a list of modules instead: each is called as it is"
    )


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    if isinstance(error, NameError) and "not installed as a submodule" in text:
        return "it calls a module that is not registered as a child"
    if "Proxy object cannot be iterated" in text:
        return "it loops over a value of the batch, or spreads it with *"
    if "'len' is not supported" in text:
        return "it takes len() of a value of the batch"
    if "OpenValue" in text or "Proxy" in text or "Attribute" in text:
        return f"it needs a value of the batch that is not known before a call ({text})"
    return text
