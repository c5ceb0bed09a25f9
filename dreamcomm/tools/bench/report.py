"""A run as text and tables: one table per collective, dtype, world and placement."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from dreamcomm.tools.bench import busy
from dreamcomm.tools.bench.cases import Case
from dreamcomm.tools.bench.ranks.variants import CEILING, CORE, DREAMCOMM
from dreamcomm.tools.bench.result import CaseResult, Prediction, Run, prediction_errors
from dreamcomm.tools.bench.sizes import format_size

WIDTH = 110  # without a terminal
ROOMY = 95  # columns from which on a table can be spaced out
# In the order of a table's lines.
OURS = (DREAMCOMM, CORE)


def print_run(console: Console, run: Run) -> None:
    """Prints everything."""
    here, versions = run.machine, run.versions
    console.print(
        f"{here.cpu}, {here.cores} cores, {here.memory / 2**30:.0f} GiB; dreamcomm "
        f"{versions.dreamcomm}, torch {versions.torch}, Python {versions.python}, "
        f"Linux {versions.kernel}",
        highlight=False,
    )
    if run.settings.beside:
        console.print(f"Measured {busy.words(run.settings.beside)}.", highlight=False)
    for title, results in by_title(run.results).items():
        console.print(f"\n{title}", style="bold", highlight=False)
        console.print(table(results, run.settings.versus, console.width >= ROOMY))
        for result in results:
            for note in result.notes:
                words = " ".join(filter(None, (size_of(result.case), result.status)))
                console.print(f"{words}: {note}", highlight=False, soft_wrap=True)
    print_closing(console, run)


def print_closing(console: Console, run: Run) -> None:
    """The cost model's errors, and the verdict if something was wrong."""
    errors = prediction_errors(run.results)
    console.print()
    if errors is not None:
        console.print(
            f"Prediction error of the cost model: median {errors.median:.0%}, at worst "
            f"{errors.worst:.0%}, over {errors.cases} cases.",
            highlight=False,
        )
    if wrong := run.wrong():
        console.print(f"WRONG results in {len(wrong)} cases, which were not timed.", style="red")


def by_title(results: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    """The cases of one table or panel, by rising size."""
    found: dict[str, list[CaseResult]] = {}
    for result in sorted(results, key=lambda result: result.case.bytes):
        found.setdefault(title_of(result.case), []).append(result)
    order = dict.fromkeys(title_of(result.case) for result in results)
    return {title: found[title] for title in order}


def title_of(case: Case) -> str:
    """The properties that a table's lines have in common."""
    words = [case.op, f"{case.world} ranks"]
    if case.op != "barrier":
        words[1:1] = [case.dtype]
        words += [f"{case.placement} tensors"] + ["in place"] * case.in_slice
    return ", ".join(words)


def table(results: list[CaseResult], versus: str | None, roomy: bool) -> Table:
    """A group of lines per size, one for each variant."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if roomy else 0))
    made.add_column("size", justify="right", no_wrap=True)
    made.add_column("through", no_wrap=True)
    ratio = [f"vs {versus}"] if versus else []
    for heading in ("p50", "p99", "algbw\nGB/s", "busbw\nGB/s", "of\nceiling", *ratio, "predicted"):
        made.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        add_lines(made, result, versus)
    return made


def add_lines(made: Table, result: CaseResult, versus: str | None) -> None:
    """The lines of one case; without times a line says why in one word."""
    size = size_of(result.case)
    if result.status != "measured":
        made.add_row(size, result.status)
    other = result.timings.get(versus or "")
    for name, timing in result.timings.items():
        ratio = f"{other.p50 / timing.p50:.2f}x" if other is not None and name in OURS else ""
        moved = result.case.bytes > 0
        cells = [
            size,
            name,
            format_time(timing.p50),
            format_time(timing.p99),
            three_digits(timing.algbw) if moved else "",
            three_digits(timing.busbw) if moved else "",
            f"{timing.of_ceiling:.0%}" if timing.of_ceiling and name != CEILING else "",
            *([ratio] if versus else []),
            format_prediction(result.prediction, name),
        ]
        made.add_row(*cells)
        size = ""
    made.add_section()


def size_of(case: Case) -> str:
    """A barrier has none."""
    return format_size(case.bytes) if case.bytes else ""


def format_prediction(prediction: Prediction | None, variant: str) -> str:
    """The prediction, on the line of the variant that it was compared with."""
    if prediction is None or prediction.of != variant:
        return ""
    return f"{format_time(prediction.seconds)} {prediction.error:+.0%}"


def format_time(seconds: float) -> str:
    """Three digits and a unit; whole nanoseconds below 1 µs."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * unit:
            return f"{three_digits(seconds / unit)} {name}"
    return f"{seconds * 1e9:.0f} ns"


def three_digits(value: float) -> str:
    """A number from 0.01 on with its digits; smaller ones have fewer."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
