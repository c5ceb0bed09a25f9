"""The progress bar of a run, drawn by rank 0."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REDRAW_SECONDS = 0.2
SMOOTHING = 0.95


class StepBar:
    """Shows steps done, smoothed loss and step time; without ``show`` it does nothing.

    It draws between steps and has no thread, so that it does not affect timings.
    """

    def __init__(self, label: str, steps: int, show: bool) -> None:
        self.loss = self.seconds = 0.0
        self.weight = 0.0
        self.drawn = 0.0
        self.progress = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("step {task.fields[milliseconds]:.1f} ms"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            disable=not show,
        )
        self.task = self.progress.add_task(label, total=steps, loss=0.0, milliseconds=0.0)

    def advance(self, loss: float, seconds: float) -> None:
        """Counts one step of ``seconds`` that had this ``loss``."""
        self.weight = SMOOTHING * self.weight + (1 - SMOOTHING)
        self.loss = SMOOTHING * self.loss + (1 - SMOOTHING) * loss
        self.seconds = SMOOTHING * self.seconds + (1 - SMOOTHING) * seconds
        self.progress.update(
            self.task,
            advance=1,
            loss=self.loss / self.weight,
            milliseconds=1e3 * self.seconds / self.weight,
        )
        if time.monotonic() - self.drawn > REDRAW_SECONDS:
            self.drawn = time.monotonic()
            self.progress.refresh()

    def __enter__(self) -> StepBar:
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.refresh()
        self.progress.stop()
