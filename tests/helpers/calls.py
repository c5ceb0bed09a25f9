"""What a test and its rank processes say to each other. Picklable, no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Group:
    """The default process group a function runs in."""

    backend: str
    world: int
    store: str  # path of the ranks' file store
    timeout: float = 30.0  # seconds one collective may take
    options: Mapping[str, Any] | None = None  # fields of dreamcomm.Options


@dataclass(frozen=True)
class Call:
    """A function to run in a rank: found again by file and name, so that it can live in
    any test file."""

    file: str
    name: str
    rank: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    group: Group | None  # none: the function gets its rank as the first argument instead
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What came of a call."""

    value: Any = None
    error: str | None = None  # the traceback, if it raised


def locate(function: Callable[..., Any]) -> tuple[str, str]:
    """File and name of a function of a module."""
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} must be a function of its module")
    return inspect.getfile(function), function.__qualname__
