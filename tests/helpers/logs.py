"""What the package logs, kept for a test to look at."""

from __future__ import annotations

import logging


class Kept(logging.Handler):
    """Keeps the texts of a logger that it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
