"""The progress bar of a run, drawn by rank 0."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dreamcomm.tools.bench.cases import Case
from dreamcomm.tools.bench.sizes import format_size


class CaseBar:
    """Shows the cases done, and the one that runs; without ``show`` it does nothing.

    It draws between cases and has no thread, so that it does not affect timings.
    """

    def __init__(self, world: int, cases: int, show: bool) -> None:
        self.progress = Progress(
            TextColumn(f"{world} ranks"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            disable=not show,
        )
        self.task = self.progress.add_task("", total=cases)

    def begin(self, case: Case) -> None:
        """Names the case that runs next."""
        words = f"{case.op} {format_size(case.bytes)} {case.dtype} {case.placement}"
        self.progress.update(self.task, description=words, refresh=True)

    def end(self) -> None:
        """Counts the case."""
        self.progress.update(self.task, advance=1)

    def __enter__(self) -> CaseBar:
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
