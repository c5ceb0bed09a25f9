"""A file that always holds a whole state of a server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Checkpoint"]


class Checkpoint:
    """Writes states beside a file, and renames them.

    Args:
        path: the file.
        every: updates between two writes.
        version: of the state that need not be written.

    Raises:
        ValueError: ``every`` is below 1.
        FileNotFoundError: there is no folder for the file.
    """

    def __init__(self, path: str | os.PathLike[str], every: int, version: int) -> None:
        if every < 1:
            raise ValueError(
                f"ParameterServer.serve: expected every of at least 1, got every={every}"
            )
        self._path, self._every, self._written = Path(path), every, version
        if not self._path.parent.is_dir():
            raise FileNotFoundError(
                f"ParameterServer.serve: there is no folder {str(self._path.parent)!r} for the "
                f"checkpoint {self._path.name!r}"
            )

    def updated(self, version: int, state: Callable[[], dict[str, Any]]) -> None:
        """Writes the state if it is due."""
        if version % self._every == 0:
            self.write(version, state)

    def write(self, version: int, state: Callable[[], dict[str, Any]]) -> None:
        """Writes the state, if that of another version was written last."""
        if version == self._written:
            return
        beside = self._path.with_name(self._path.name + ".part")
        with beside.open("wb") as file:
            torch.save(state(), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        self._written = version
