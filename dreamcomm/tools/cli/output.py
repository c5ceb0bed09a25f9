"""Standard output that cannot be written: one line for the user, not a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputError(Exception):
    """Standard output cannot be written. No OSError, which commands take for one of theirs."""


class Output(io.FileIO):
    """A descriptor whose errors can be distinguished from those of other files."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # the reader has closed the pipe: rich and typer end quietly
            raise
        except OSError as error:
            raise OutputError(error.strerror or str(error)) from error


@contextmanager
def told_file(path: Path) -> Iterator[None]:
    """Ends the program with a line on stderr and status 1 where this file cannot be written."""
    try:
        yield
    except OSError as error:
        sys.exit(f"dreamcomm: cannot write {path}: {error.strerror or error}")


@contextmanager
def told_output() -> Iterator[None]:
    """Ends the program with a line on stderr and status 1 where its output cannot be written."""
    if not isinstance(sys.stdout, io.TextIOWrapper):  # closed, or a notebook's
        yield
        return
    sys.stdout = told = watched(sys.stdout)
    try:
        try:
            yield
        finally:
            told.flush()  # at the interpreter's end an error could only be complained of
    except OutputError as error:
        discard(told.fileno())
        sys.exit(f"dreamcomm: cannot write the output: {error}")
    except BrokenPipeError:
        discard(told.fileno())
        sys.exit(1)


def watched(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, with an :class:`Output` below it."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(Output(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )


def discard(descriptor: int) -> None:
    """Discards buffered output, because Python would write it again when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
