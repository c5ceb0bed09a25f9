"""What the package logs, kept for a test to look at."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


class Kept(logging.Handler):
    """Keeps the texts of a logger that it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def warnings_of_all_threads() -> Iterator[list[str]]:
    """What dreamcomm warns of: Python's threads in its log, its own on the error output.

    The list is complete at the end of the block.
    """
    kept, logger = Kept(), logging.getLogger("dreamcomm")
    before = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        logger.addHandler(kept)
        try:
            yield kept.texts
        finally:
            logger.removeHandler(kept)
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        prefix = "dreamcomm: "
        lines = file.read().splitlines()
    kept.texts += [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
