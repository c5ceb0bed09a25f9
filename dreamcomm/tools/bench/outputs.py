"""The files that a run writes in its end: whether that will work, and errors with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class NotWrittenError(Exception):
    """A file could not be written; the text names it and the reason."""


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Raises NotWrittenError for errors with this file."""
    try:
        yield
    except OSError as error:
        raise NotWrittenError(f"cannot write {path}: {error.strerror or error}") from error


def check_output(path: Path | None) -> None:
    """Raises ValueError if a file could not be written in the end."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.absolute().parent} to write {path.name} to")
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
    if is_new:
        path.unlink(missing_ok=True)  # torchrun's other ranks look at the same file


def write_json(path: Path, content: Mapping[str, object], indent: int = 2) -> None:
    """Writes a document that ends with a line."""
    path.write_text(json.dumps(content, indent=indent) + "\n")
